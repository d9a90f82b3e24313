"""Why the parser refused: one sentence with the key, its place and the nearest valid name.

The parser's own text is nested and names no file. So after a refusal the given options are walked
from the top, class by class, and the first that cannot be right is reported; the text is only the
last resort.
"""

import re
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_shard.cli.names import (
    accepts,
    class_hints,
    describe,
    find_class,
    is_number,
    nearest,
    parameters,
    required,
)
from lightning_shard.cli.sources import COMMAND_LINE, SPEC, Tree, UsageError

PARSER_ONLY = ("config", "print_config", "help", "print_shtab")
GROUPS = {"model": LightningModule, "data": LightningDataModule}


def diagnose(tree: Tree, known: set[str], message: str, subcommand: str) -> UsageError:
    """Turn a refusal of the parser into one sentence.

    Args:
        tree: What the user gave.
        known: The top-level options of the subcommand.
        message: The parser's own text.
        subcommand: For the hint that shows how to see all options.

    Returns:
        The error to show.
    """
    help_hint = f"all options: python -m lightning_shard {subcommand} --help"
    problem = next(_problems(tree, known), None)
    if problem:
        return UsageError(problem, help_hint if problem.startswith("unknown option") else "")
    return _last_resort(tree, message)


def _problems(tree: Tree, known: set[str]) -> Iterator[str]:
    for key, node in tree.children.items():
        if key.endswith(".help") or key in PARSER_ONLY:
            continue
        if key not in known:
            yield f"unknown option '{key}' {node.where}{nearest(key, known)}"
        elif key == "trainer":
            yield from _arguments(node.children, Trainer, "trainer", 0, -1)
        elif key in GROUPS:
            yield from _class_spec(node, [(GROUPS[key], 0)], key)
    for key, base in GROUPS.items():
        if key not in tree.children:
            yield (
                f"the option '{key}' is missing: it names the {base.__name__}; "
                f"give --{key} ClassName, or a config file with '{key}: class_path:'"
            )


def _arguments(
    given: dict[str, Tree], cls: type, prefix: str, skip: int, since: int
) -> Iterator[str]:
    accepted = parameters(cls, skip)
    for name, node in given.items():
        key = f"{prefix}.{name}"
        if name not in accepted:
            if node.order >= since:  # older ones belonged to another class and were discarded
                yield f"unknown option '{key}' {node.where}{nearest(name, accepted)}"
            continue
        for version in (node, *node.replaced):
            if version.order >= since:
                yield from _value(version, cls, name, key, skip, accepted[name])


def _value(node: Tree, cls: type, name: str, key: str, skip: int, hint: Any) -> Iterator[str]:
    bases = class_hints(hint)
    items = node.children.items() if node.is_list else [("", node)]
    for index, item in items:
        place = f"{key}.{index}" if index else key
        looks_like_class = set(item.children) & set(SPEC) or (
            node.is_list and isinstance(item.value, str)
        )
        if bases and looks_like_class:
            yield from _class_spec(item, bases, place)
    value = node.plain()
    if accepts(cls, name, value, skip):
        return
    if bases and isinstance(value, str) and not is_number(hint):
        yield from _class_spec(node, bases, key)
    text = f"{key} must be {describe(hint)}; got '{value}' {node.where}"
    literals = re.findall(r"[\w-]+", describe(hint)) if "one of" in describe(hint) else []
    yield text + nearest(str(value), literals, "use one of") if literals else text


def _class_spec(node: Tree, bases: list[tuple[type, int]], key: str) -> Iterator[str]:
    spec = node.children.get("class_path") or node
    path = spec.value
    if not isinstance(path, str):
        if key in GROUPS:
            yield f"the option '{key}.class_path' is missing {node.where}"
        return
    cls, why = find_class(path, [base for base, _ in bases])
    if cls is None:
        label = f"{key}.class_path" if node.children else key
        yield f"unknown class '{path}' for {label} {spec.where}{why}"
        return
    skip = next((n for base, n in bases if issubclass(cls, base)), 0)
    inner = node.children.get("init_args", Tree()).children
    inner = inner | {name: child for name, child in node.children.items() if name not in SPEC}
    yield from _arguments(inner, cls, f"{key}.init_args", skip, spec.order)
    extra = node.children.get("dict_kwargs", Tree()).children
    for name in required(cls, skip):
        if name not in inner and name not in extra:
            option = f"{key}.init_args.{name}"
            yield f"the option '{option}' is missing: {cls.__name__} needs it ({spec.where})"


def _last_resort(tree: Tree, message: str) -> UsageError:
    found = re.search(r"""(?:[kK]ey|[oO]ption) ["']([\w.+-]+)["']""", message)
    node = tree.get(found.group(1)) if found else None
    place = f" ({found.group(1)} {node.where})" if found and node else ""
    if unrecognized := re.match(r"unrecognized arguments: (\S+)", message):
        return UsageError(f"unknown option '{unrecognized.group(1)}' {COMMAND_LINE}")
    return UsageError(message.strip() + place)
