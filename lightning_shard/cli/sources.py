"""What the user gave: every option with the file and line, variable or command line it is from.

`Tree` merges the sources in the order in which the parser does, later ones winning, and remembers
for each node where it was written. Reading happens before parsing, so a missing file, a YAML
mistake or a misplaced subcommand is reported here and nothing else has to be understood.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from lightning_shard.cli.names import nearest

ENV_PREFIX = "LIGHTNING_SHARD"
SPEC = ("class_path", "init_args", "dict_kwargs")
COMMAND_LINE = "on the command line"


class UsageError(Exception):
    """A mistake in what the user typed: one sentence, and perhaps a hint for a second line."""

    def __init__(self, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.hint = hint


@dataclass
class Tree:
    """A node of the merged configuration; `where` reads on after a key: "at a.yaml:3".

    Args:
        where: Where the node was written last.
        order: Number of the source it came from; larger is later.
        value: The scalar, for a leaf.
        children: Sub-nodes by key, or by index for a list.
        is_list: Whether the children are list items.
        replaced: Earlier nodes that this one replaced; the parser checks them too.
    """

    where: str = COMMAND_LINE
    order: int = -1
    value: object = None
    children: dict[str, "Tree"] = field(default_factory=dict)
    is_list: bool = False
    replaced: list["Tree"] = field(default_factory=list)

    def get(self, key: str) -> "Tree | None":
        """The node at a dotted key, if given; `init_args` may be left out, as in the parser."""
        node = self
        for part in key.split("."):
            children = node.children
            inner = children["init_args"].children if "init_args" in children else {}
            if part == "init_args" and part not in children and children:
                continue
            found = children.get(part) or inner.get(part)
            if found is None:
                return None
            node = found
        return node

    def plain(self) -> object:
        """The node as YAML would load it."""
        if self.is_list:
            return [child.plain() for child in self.children.values()]
        if self.children:
            return {key: child.plain() for key, child in self.children.items()}
        return self.value

    def merge(self, other: "Tree") -> None:
        """Put a later source on top: mappings merge, everything else replaces."""
        before = replace(self)
        self.where, self.order = other.where, other.order
        if other.is_list or self.is_list or not other.children:
            short_class = isinstance(other.value, str) and "class_path" in self.children
            if (
                short_class
            ):  # `--model Name` over a class_path keeps the init_args, as the parser does
                self.children["class_path"] = other
                return
            self.children, self.is_list, self.value = other.children, other.is_list, other.value
            self.replaced = [*self.replaced, before]
            return
        for key, child in other.children.items():
            if key in self.children:
                self.children[key].merge(child)
            else:
                self.children[key] = child

    def put(self, key: str, given: "Tree") -> None:
        """Merge a node at a dotted key, as an option on the command line does."""
        key = self._long_form(key)
        head, _, rest = key.partition(".")
        if self.is_list and not head.isdigit() and self.children:
            next(reversed(self.children.values())).put(key, given)
            return
        if head.endswith("+") and not rest:
            node = self.children.setdefault(head[:-1], Tree(given.where, given.order, is_list=True))
            items = given.children.values() if given.is_list else [given]
            for item in items:
                node.children[str(len(node.children))] = item
            return
        node = self.children.setdefault(head, Tree(given.where, given.order))
        if isinstance(node.value, str) and rest:  # `--model Name --model.width 3`
            node.children = {"class_path": Tree(node.where, node.order, node.value)}
            node.value = None
        if rest:
            node.put(rest, given)
        else:
            node.merge(given)

    def _long_form(self, key: str) -> str:
        """Options of a class belong under `init_args`, whichever of the two forms came first."""
        if key.split(".")[0] in SPEC:
            short = {name: self.children.pop(name) for name in [*self.children] if name not in SPEC}
            if short:
                self.children["init_args"] = Tree(self.where, self.order, children=short)
            return key
        return f"init_args.{key}" if self.children.keys() & set(SPEC) else key


def read_sources(args: Sequence[str], subcommand: str) -> Tree:
    """Merge environment, config files and options that follow the subcommand."""
    tree = Tree()
    for order, (key, given) in enumerate(_sources(args, subcommand)):
        _number(given, order)
        if key:
            tree.put(key, given)
        else:
            tree.merge(given)
    return tree


def split_subcommand(args: Sequence[str], names: Sequence[str]) -> tuple[str, list[str]] | None:
    """The subcommand and what follows it; None where the parser answers (help, completion)."""
    if {"-h", "--help", "--print_shtab", "--print_completion"} & set(args[:1]):
        return None
    usage = f"python -m lightning_shard {'|'.join(names)} --config file.yaml"
    if not args:
        if f"{ENV_PREFIX}_SUBCOMMAND" in os.environ:
            return None
        raise UsageError(f"a subcommand is missing: give one of {', '.join(names)}", usage)
    if args[0] in names:
        return args[0], list(args[1:])
    if not args[0].startswith("-"):
        raise UsageError(
            f"unknown subcommand '{args[0]}'{nearest(args[0], names, 'give one of')}", usage
        )
    for index, arg in enumerate(args):
        if arg in names:
            swapped = " ".join([arg, *args[:index], *args[index + 1 :]])
            raise UsageError(
                f"the subcommand '{arg}' comes first, options after it",
                f"python -m lightning_shard {swapped}",
            )
    raise UsageError(
        f"a subcommand is missing before '{args[0]}': give one of {', '.join(names)}", usage
    )


def read_yaml(path: str) -> Tree:
    """Compose one file into a tree with line numbers."""
    file = Path(path)
    if not file.is_file():
        siblings = (
            sorted(p.name for p in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
        )
        close = nearest(file.name, siblings, f"{file.parent} has", quote_parent=file.parent)
        raise UsageError(f"config file '{path}' does not exist{close}")
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{line} is not valid YAML: {err.problem or err.context}") from err
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise UsageError(f"{path} is not valid YAML: {err}") from err
    if root is None:
        return Tree(f"at {path}")
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}:1 must be a mapping of options such as 'trainer:' and 'model:'")
    return _tree(root, path, root.start_mark.line + 1)


def _sources(args: Sequence[str], subcommand: str) -> Iterator[tuple[str, Tree]]:
    prefix = f"{ENV_PREFIX}_{subcommand.upper()}__"
    for name, value in os.environ.items():
        if name == prefix + "CONFIG":
            yield "", read_yaml(value)
        elif name.startswith(prefix):
            key = name.removeprefix(prefix).lower().replace("__", ".")
            yield key, _scalar(value, f"in the variable {name}")
    words = list(args)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            raise UsageError(f"unexpected '{word}' {COMMAND_LINE}: options are --key value")
        option, equals, value = word.partition("=")
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        if option in ("-c", "--config"):
            yield "", read_yaml(value)
        elif option.startswith("--"):
            yield option[2:], _scalar(value, COMMAND_LINE)


def _scalar(text: str, where: str) -> Tree:
    if text.endswith((".yaml", ".yml")) and Path(text).is_file():
        return read_yaml(text)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        root = None
    if root is None or isinstance(root, yaml.ScalarNode):
        return Tree(where, value=_load(root) if root else text)
    return _tree(root, "", 0, where)


def _tree(node: yaml.Node, path: str, line: int, where: str = "") -> Tree:
    place = where or f"at {path}:{line}"
    if isinstance(node, yaml.MappingNode):
        children = {
            str(key.value): _tree(value, path, key.start_mark.line + 1, where)
            for key, value in node.value
        }
        return Tree(place, children=children)
    if isinstance(node, yaml.SequenceNode):
        items = [_tree(item, path, item.start_mark.line + 1, where) for item in node.value]
        return Tree(place, children={str(i): item for i, item in enumerate(items)}, is_list=True)
    return Tree(place, value=_load(node))


def _load(node: yaml.Node) -> object:
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node, deep=True)
        if isinstance(value, str):  # YAML 1.1 reads 1e-3 as a string; the parser does not
            try:
                return float(value) if value[:1] in "+-.0123456789" else value
            except ValueError:
                return value
        return value
    except yaml.YAMLError:
        return str(node.value)


def _number(tree: Tree, order: int) -> None:
    tree.order = order
    for child in tree.children.values():
        _number(child, order)
