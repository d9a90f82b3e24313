"""The place of each option: file and line, variable, or the words of the command line.

`--config tfno_darcy` and `--config tutorials/t5` name files that came with the package.

Files are read here before the parser reads them, in bounded time: aliases that multiply, levels
without end and keys that are given twice, all of which YAML takes, are refused. Nothing is merged.
"""

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from lightning_shard.cli.usage import ENV_PREFIX, UsageError, nearest_file
from lightning_shard.processes.nearest import nearest

WORKLOADS = "lightning_modules"  # the package whose classes and configs have short names
TUTORIALS = "tutorials"  # the folder whose configs are named with it
OWN_VARIABLES = ("TRACEBACK", "SUBCOMMAND", "CONFIG", "LAUNCHER", "CPU_SETTINGS", "SIGTERM_S")
COMMAND_LINE = "on the command line"
MAX_VALUES, MAX_LEVELS, MAX_BYTES = 100_000, 100, 2**24
MERGE, PYTHON = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:python"


@dataclass(frozen=True)
class Option:
    """An option as it was written: its dotted key, its text ("" for a mapping) and its place."""

    key: str
    text: str
    where: str


@dataclass(frozen=True)
class Given:
    """The options in the order in which the parser takes them; later ones win."""

    options: tuple[Option, ...] = ()

    def last(self, key: str, text: str = "", of: str = "") -> Option | None:
        """Return what was written last for a key, in any item of a list, or else below the key.

        Args:
            key: The dotted key.
            text: The value to look for; if none has it, any value is taken.
            of: The name of the class whose option it is; if no item has it, any item is taken.
        """
        key = bare(key)
        found = [option for option in self.options if bare(option.key) == key]
        found = found or [o for o in self.options if bare(o.key).startswith(f"{key}.")]
        named = (o.key.removesuffix("class_path") for o in self.options if o.text.endswith(of))
        owners = tuple(named) if of else ()
        better = [o for o in found if (o.text == text if text else o.key.startswith(owners))]
        return (better or found or [None])[-1]

    def place(self, key: str) -> str:
        """Return the place where a dotted key was written last; empty if it was not."""
        option = self.last(key)
        return option.where if option else ""

    def mentioned(self, text: str) -> list[str]:
        """List the options that a sentence names by the last part of the key, and their places."""
        words = {*re.findall(r"\w+", text)}
        keys = {bare(o.key) for o in self.options if o.text and re.search(r"\.\D[^.]*$", o.key)}
        named = sorted(key for key in keys if key.rpartition(".")[2] in words)
        return [f"{key} is set {self.place(key)}" for key in named]

    def __contains__(self, key: str) -> bool:
        return bool(self.place(key))


@cache
def bare(key: str) -> str:
    """Drop the parts of a dotted key that may be left out, and the numbers of items."""
    *above, last = (part.removesuffix("+") for part in key.split("."))
    kept = (p for p in above if p not in ("init_args", "dict_kwargs") and not p.isdigit())
    return ".".join((*kept, last))


def named_configs() -> dict[str, Path]:
    """Find the configs that came with the package, by their bare names.

    They are in the wheel, or beside the package in a checkout.
    """
    spec = importlib.util.find_spec(WORKLOADS)
    for place in spec.submodule_search_locations or [] if spec else []:
        for here in (Path(place) / "configs", Path(place).parent / "configs"):
            if (here / "tfno_darcy.yaml").is_file():
                found = sorted([*here.glob("*.yaml"), *here.glob("overlays/*.yaml")])
                nested = {f"{TUTORIALS}/{p.stem}": p for p in here.glob(f"{TUTORIALS}/*.yaml")}
                return {path.stem: path for path in found} | nested
    return {}


def find_configs(words: Sequence[str]) -> list[str]:
    """Put paths in place of bare names of configs into the words of a command line.

    A bare name has neither a suffix nor a folder other than `tutorials`, and no file of the working
    directory has it.

    Raises:
        UsageError: No config of the package has the name.
    """
    found = list(words)
    for index, word in enumerate(found):
        option, equals, value = word.partition("=")
        if option in ("-c", "--config") and equals:
            found[index] = f"{option}={_path_of(value)}"
        elif word in ("-c", "--config") and index + 1 < len(found):
            found[index + 1] = _path_of(found[index + 1])
    for name, value in os.environ.items():
        if name.startswith(f"{ENV_PREFIX}_") and name.endswith("CONFIG") and value:
            os.environ[name] = _path_of(value)
    return found


def _path_of(name: str) -> str:
    if Path(name).exists() or name.removeprefix(f"{TUTORIALS}/") != Path(name).stem:
        return name
    configs = named_configs()
    if name not in configs:
        longer = [config for config in configs if name in config]
        close = nearest(name, longer or configs, "the package has")
        raise UsageError(
            f"there is no file '{name}', and no config of this name came with the package{close}"
        )
    return str(configs[name])


def read_given(words: Sequence[str], subcommand: str) -> Given:
    """Read the environment, and the words after a subcommand with the files that they name.

    Raises:
        UsageError: A file is missing or no YAML, or a word is no option.
    """
    return Given((*_variables(subcommand), *_words(words)))


def check_variables(subcommands: Sequence[str], keys: Iterable[str]) -> None:
    """Refuse a variable of the environment that would change nothing.

    Args:
        subcommands: The names of all subcommands.
        keys: The dotted options that a variable can give.

    Raises:
        UsageError: A variable begins as ours do, and names no option.
    """
    options = ("CONFIG", *(key.upper().replace(".", "__") for key in keys))
    known = {f"{ENV_PREFIX}_{name}" for name in OWN_VARIABLES}
    for command in subcommands:
        known |= {f"{ENV_PREFIX}_{command.upper()}__{option}" for option in options}
    for name in os.environ:
        if name.startswith(f"{ENV_PREFIX}_") and name not in known:
            raise UsageError(f"the variable {name} names no option{nearest(name, known)}")


def _variables(subcommand: str) -> Iterator[Option]:
    prefix = f"{ENV_PREFIX}_{subcommand.upper()}__"
    for name, value in os.environ.items():
        if name == prefix + "CONFIG":
            yield from read_file(value)
        elif name.startswith(prefix):
            key = name.removeprefix(prefix).lower().replace("__", ".")
            yield from _option(key, value, f"in the variable {name}")


def _words(args: Sequence[str]) -> Iterator[Option]:
    words = list(args)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            raise UsageError(f"unexpected '{word}' {COMMAND_LINE}: options are --key value")
        if re.fullmatch(r"-[^-ch].*|-\w[\w-]+(\..*|=.*|)", word):
            close = f"; did you mean '-{word}'?" if len(word) > 2 else ""
            raise UsageError(f"unknown option '{word}' {COMMAND_LINE}{close}")
        option, equals, value = word.partition("=")
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        if option in ("-c", "--config"):
            if not value:
                raise UsageError(f"the option 'config' has no value {COMMAND_LINE}")
            yield from read_file(value)
        elif option.startswith("--"):
            yield from _option(option[2:], value, COMMAND_LINE)


def _option(key: str, text: str, where: str) -> Iterator[Option]:
    yield Option(key, text, where)
    if text.endswith((".yaml", ".yml")) and Path(text).is_file():
        yield from read_file(text, (key,))
    elif text[:1] in tuple("[{"):
        with suppress(yaml.YAMLError, RecursionError):  # said by the parser
            yield from _Walk(f"a value {where}", where).options(yaml.compose(text), (key,), 0)


def read_file(path: str, key: tuple[str, ...] = ()) -> Iterator[Option]:
    """Yield the options of one file.

    Raises:
        UsageError: It does not exist, cannot be read, or is no mapping of options.
    """
    file = Path(path)
    if not file.exists():
        raise UsageError(f"config file '{path}' does not exist{nearest_file(file, '*.y*ml')}")
    if not file.is_file():
        what = "a folder" if file.is_dir() else "a pipe or a device"
        raise UsageError(f"config file '{path}' is {what}, not a file; name a YAML file")
    if file.stat().st_size > MAX_BYTES:
        raise UsageError(f"{path} has more than {MAX_BYTES:,} bytes, which no config needs")
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except RecursionError as err:
        raise UsageError(f"{path} has more than {MAX_LEVELS} levels; write it flatter") from err
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
        mark = getattr(err, "problem_mark", None) or getattr(err, "context_mark", None)
        why = getattr(err, "problem", None) or getattr(err, "context", None) or err
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{line} is not valid YAML: {why}") from err
    if root is None:
        raise UsageError(f"{path} has no options; write some, such as 'trainer:', or leave it out")
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}:1 must be a mapping of options such as 'trainer:' and 'model:'")
    yield from _Walk(path).options(root, key, 0)


class _Walk:
    """A walk through the nodes of a document, which ends when it is longer than any config."""

    def __init__(self, name: str, where: str = "") -> None:
        self.name, self.where, self.left = name, where, MAX_VALUES

    def options(self, node: yaml.Node | None, key: tuple[str, ...], level: int) -> Iterator[Option]:
        """Yield the options below a node, or raise a UsageError for what no config needs."""
        self.left -= 1
        if self.left < 0:
            raise UsageError(
                f"{self.name} holds more than {MAX_VALUES:,} values once its aliases (*name) are "
                "replaced; write out what you need"
            )
        if level > MAX_LEVELS:
            raise UsageError(f"{self.name} has more than {MAX_LEVELS} levels; write it flatter")
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                yield from self._entry(item, item, (*key, str(index)), level)
        if not isinstance(node, yaml.MappingNode):
            return
        lines: dict[str, int] = {}
        for name_node, child in sorted(node.value, key=lambda pair: pair[0].tag != MERGE):
            name, line = str(name_node.value), name_node.start_mark.line + 1
            if name_node.tag == MERGE:  # before the mapping's own keys, which win
                yield from self.options(child, key, level + 1)
                continue
            if name in lines:
                raise UsageError(
                    f"{self.name}:{line} gives '{'.'.join((*key, name))}' a second time (the first "
                    f"is in line {lines[name]}); keep one of them"
                )
            lines[name] = line
            yield from self._entry(name_node, child, (*key, name), level)

    def _entry(
        self, at: yaml.Node, value: yaml.Node, key: tuple[str, ...], level: int
    ) -> Iterator[Option]:
        where = self.where or f"at {self.name}:{at.start_mark.line + 1}"
        if value.tag.startswith(PYTHON):
            tag = value.tag.replace(PYTHON, "!!python")
            raise UsageError(f"'{tag}' {where} names an object of Python; give its value")
        text = value.value if isinstance(value, yaml.ScalarNode) else ""
        yield Option(".".join(key), text, where)
        yield from self.options(value, key, level + 1)
