"""YAML files as plain values, with the line of each key.

A file is read in bounded time and memory: aliases that multiply, and levels without end, are
refused.
"""

from pathlib import Path

import yaml

from lightning_shard.cli.usage import UsageError, is_mapping, nearest_file

Places = dict[str, str]  # of dotted keys without init_args: "at a.yaml:3"
MAX_VALUES, MAX_LEVELS, MAX_BYTES = 100_000, 100, 2**24
MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: str) -> tuple[dict[str, object], Places]:
    """Read one file.

    Raises:
        UsageError: It does not exist, cannot be read, or is no mapping of options.
    """
    root = _compose(_text(path), path)
    if root is None:
        return {}, {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}:1 must be a mapping of options such as 'trainer:' and 'model:'")
    reader = _Reader(path)
    value = reader.value(root, (), 0)
    assert is_mapping(value)
    return value, reader.places


def scalar_or_tree(text: str, where: str) -> object:
    """What a word of the command line, or a variable, says."""
    try:
        root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        return text if root is None else _Reader("").value(root, (), 0)
    except (yaml.YAMLError, RecursionError):
        return text
    except UsageError as err:
        raise UsageError(f"a value {where} {str(err).strip()}") from err


def _text(path: str) -> str:
    file = Path(path)
    if not file.exists():
        raise UsageError(f"config file '{path}' does not exist{nearest_file(file, '*.y*ml')}")
    if not file.is_file():
        what = "a folder" if file.is_dir() else "a pipe or a device"
        raise UsageError(f"config file '{path}' is {what}, not a file; name a YAML file")
    if file.stat().st_size > MAX_BYTES:
        raise UsageError(f"{path} has more than {MAX_BYTES:,} bytes, which no config needs")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"{path} is not valid YAML: {err}") from err


def _compose(text: str, path: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{line} is not valid YAML: {err.problem or err.context}") from err
    except yaml.YAMLError as err:
        raise UsageError(f"{path} is not valid YAML: {err}") from err
    except RecursionError as err:
        raise UsageError(f"{path} has more than {MAX_LEVELS} levels; write it flatter") from err


class _Reader:
    """Builds plain values from nodes, and notes the line of each key."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.places: Places = {}
        self.left = MAX_VALUES
        self.loader = yaml.SafeLoader("")

    def value(self, node: yaml.Node, key: tuple[str, ...], level: int) -> object:
        self.left -= 1
        if self.left < 0:
            raise UsageError(
                f"{self.path} holds more than {MAX_VALUES:,} values once its aliases (*name) are "
                "replaced; write out what you need"
            )
        if level > MAX_LEVELS:
            raise UsageError(f"{self.path} has more than {MAX_LEVELS} levels; write it flatter")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key, level)
        if isinstance(node, yaml.SequenceNode):
            found: list[object] = []
            for item in node.value:
                self._note((*key, str(len(found))), item)
                found.append(self.value(item, (*key, str(len(found))), level + 1))
            return found
        return self._scalar(node)

    def _mapping(
        self, node: yaml.MappingNode, key: tuple[str, ...], level: int
    ) -> dict[str, object]:
        merged: dict[str, object] = {}
        own: dict[str, object] = {}
        lines: dict[str, int] = {}
        for name_node, child in node.value:
            name, line = str(name_node.value), name_node.start_mark.line + 1
            if name_node.tag == MERGE:
                for each in child.value if isinstance(child, yaml.SequenceNode) else [child]:
                    value = self.value(each, key, level + 1)
                    merged = {**value, **merged} if is_mapping(value) else merged
                continue
            if name in lines:
                raise UsageError(
                    f"{self.path}:{line} gives '{'.'.join((*key, name))}' a second time (the first "
                    f"is in line {lines[name]}); keep one of them"
                )
            lines[name] = line
            inner = key if name in ("init_args", "dict_kwargs") else (*key, name)
            if inner != key:
                self._note(inner, name_node)
            own[name] = self.value(child, inner, level + 1)
        return {**merged, **own}

    def _note(self, key: tuple[str, ...], node: yaml.Node) -> None:
        self.places[".".join(key)] = f"at {self.path}:{node.start_mark.line + 1}"

    def _scalar(self, node: yaml.Node) -> object:
        try:
            value: object = self.loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError):
            return str(node.value)
        if isinstance(value, str) and value[:1] in tuple("+-.0123456789"):
            try:  # YAML 1.1 reads 1e-3 as a string; the parser does not
                return float(value)
            except ValueError:
                return value
        return value
