"""`python -m lightning_shard ops` lists functions that run on split tensors, and their limits."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightning_shard.cli.usage import UsageError
from lightning_shard.ops import functions_with_rules, limits_of, name_of
from lightning_shard.points import neighbours as neighbours  # its rules are listed, too
from lightning_shard.processes.nearest import nearest

PREFIXES = {
    "torch.nn.functional.": "F.",
    "torch.ops.torchvision.": "torchvision.ops.",
    "torch.": "",
    "Tensor.": "",
}
INTRODUCTION = """\
# Functions that run on split tensors

Forward and backward, any extents on any number of ranks equal one process. A name without a prefix
stands for the function in `torch` and the method of `Tensor`, where torch has both; `F` is
`torch.nn.functional`. Whatever is not in this table, and every use that a limit excludes, raises an
error that names the function and where the tensor is split. This page is what
`python -m lightning_shard ops --markdown` prints (here with torch {version}).
"""


@dataclass
class Family:
    """A module of rules: the first line of its docstring, and its functions by their limits."""

    title: str
    names: dict[str, set[str]] = field(default_factory=dict[str, set[str]])


def families() -> list[Family]:
    """Return all functions with a rule, in the order of their modules."""
    found: dict[str, Family] = {}
    for function, rule in functions_with_rules().items():
        module = getattr(rule, "func", rule).__module__  # a rule may be a functools.partial
        title = (sys.modules[module].__doc__ or module).strip().splitlines()[0].rstrip(".")
        family = found.setdefault(module, Family(title))
        family.names.setdefault(limits_of(function), set()).add(_short(name_of(function)))
    return [found[name] for name in sorted(found)]


def _short(name: str) -> str:
    for prefix, shorter in PREFIXES.items():
        if name.startswith(prefix):
            return shorter + name.removeprefix(prefix)
    return name


def as_markdown(found: Sequence[Family]) -> str:
    """Write the families as a page of documentation."""
    version = torch.__version__.partition("+")[0]
    lines = [INTRODUCTION.format(version=version)]
    for family in found:
        lines += [f"## {family.title}", "", "| functions | limits |", "| --- | --- |"]
        for limits, names in sorted(family.names.items()):
            listed = ", ".join(f"`{name}`" for name in sorted(names))
            lines.append(f"| {listed} | {limits} |")
        lines.append("")
    return "\n".join(lines)


def as_text(found: Sequence[Family]) -> str:
    """Write the families for a terminal."""
    lines: list[str] = []
    for family in found:
        lines.append(family.title)
        for limits, names in sorted(family.names.items()):
            listed = ", ".join(sorted(names))
            lines += textwrap.wrap(listed, 96, initial_indent="  ", subsequent_indent="  ")
            lines += [f"    limits: {limits}"] if limits else []
    return "\n".join(lines)


def matching(found: Sequence[Family], word: str) -> list[Family]:
    """Keep the functions whose name contains `word`."""
    chosen: list[Family] = []
    for family in found:
        names = {k: {n for n in v if word.lower() in n.lower()} for k, v in family.names.items()}
        kept = {k: v for k, v in names.items() if v}
        chosen += [Family(family.title, kept)] if kept else []
    return chosen


def ops(options: argparse.Namespace) -> None:
    """Print the functions that run on split tensors.

    Raises:
        UsageError: No function has the name asked for.
    """
    known = families()
    found = matching(known, options.name)
    if not found:
        names = {n for family in known for each in family.names.values() for n in each}
        register = "; register a rule with lightning_shard.register_rule, or gather the tensor"
        close = nearest(options.name, names, "") or register
        raise UsageError(
            f"no function with '{options.name}' in its name runs on split tensors{close}"
        )
    print(as_markdown(found) if options.markdown else as_text(found))
