"""Why the parser refused: one sentence with the key, its place and the nearest valid name.

The parser's own text is nested and names no file. So after a refusal the sources are read in their
order, each option against the class that is in force there, and the first that cannot be right is
reported. Where nothing is found the parser's text is shown.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_shard.cli.names import (
    accepts,
    class_hints,
    describe,
    find_class,
    is_number,
    literals,
    parameters,
    required,
    takes_mapping,
)
from lightning_shard.cli.sources import COMMAND_LINE, SPEC, Source, Sources, short
from lightning_shard.cli.usage import UsageError, did_you_mean, is_list, is_mapping, nearest
from lightning_shard.trainer.strategy import HybridShardStrategy

# options of ours that are true or false: the default, and what help says
SWITCHES = {
    "test_after_fit": (
        False,
        "Run the test loaders on the final weights when fit ends (only fit uses it).",
    ),
    "profile": (
        False,
        "Record three steps of all ranks into one trace, and print where the time goes (only fit "
        "uses it).",
    ),
    "report": (True, "Write report.html about the run into its log directory (only fit uses it)."),
}
PARSER_ONLY = ("config", "print_config", "help", "print_shtab")
GROUPS: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}


def diagnose(sources: Sources, known: set[str], message: str, subcommand: str) -> UsageError:
    """Turn a refusal of the parser into one sentence.

    Args:
        sources: What the user gave.
        known: The top-level options of the subcommand.
        message: The parser's own text.
        subcommand: For the hint that shows how to see all options.

    Returns:
        The error to show.
    """
    problem = next(_Walk(sources, known).problems(), None)
    if problem is None:
        return _last_resort(sources, message)
    hint = f"all options: python -m lightning_shard {subcommand} --help all"
    return UsageError(problem, hint if problem.startswith("unknown option") else "")


class _Walk:
    """Goes through the sources, and knows which class each option holds at that point."""

    def __init__(self, sources: Sources, known: set[str]) -> None:
        self.sources, self.known = sources, known
        self.source = Source({}, COMMAND_LINE)
        # by option, with arguments to skip; the strategy is ours where nobody names one
        self.classes: dict[str, tuple[type, int]] = {"trainer.strategy": (HybridShardStrategy, 0)}
        self.named: dict[str, str] = {}  # where the user named the class of an option
        self.lengths: dict[str, int] = {}  # of lists
        self.seen: set[str] = set()

    def problems(self) -> Iterator[str]:
        """The sentences, those of earlier sources first."""
        for source in self.sources.given:
            self.source = source
            for key, value in source.options.items():
                yield from self._option(key, value)
        for key, base in GROUPS.items():
            if key in self.classes:
                continue
            if place := self.sources.place(key):
                yield from self._almost_class_path(key)
                yield f"the option '{key}.class_path' is missing {place}"
            else:
                yield (
                    f"the option '{key}' is missing: it names the {base.__name__}; "
                    f"give --{key} ClassName, or a config file with '{key}: class_path:'"
                )
        for key, place in self.named.items():
            cls, skip = self.classes[short(key)]
            for name in required(cls, skip):
                option = f"{key}.init_args.{name}"
                if short(option) not in self.seen:
                    yield f"the option '{option}' is missing: {cls.__name__} needs it ({place})"

    def _almost_class_path(self, key: str) -> Iterator[str]:
        spec = self.sources.value(key)
        for name in spec if is_mapping(spec) else ():
            if get_close_matches(name, SPEC[:1]):
                place = self.sources.place(f"{key}.{name}")
                yield f"unknown option '{key}.{name}' {place}{nearest(name, SPEC)}"

    def _option(self, key: str, value: object) -> Iterator[str]:
        if key in PARSER_ONLY or (is_mapping(value) and "help" in value):
            return
        if key not in self.known:
            close = self._below(key) or nearest(key, self.known)
            yield f"unknown option '{key}' {self.source.place(key)}{close}"
        elif key == "seed_everything" and not isinstance(value, bool | int):
            yield f"{key} must be an integer, true or false; got '{value}' {self.source.place(key)}"
        elif key in SWITCHES and not isinstance(value, bool):
            yield f"{key} must be true or false; got '{value}' {self.source.place(key)}"
        elif key == "trainer" and is_mapping(value):
            yield from self._arguments(value, Trainer, "trainer", 0)
        elif key in GROUPS:
            yield from self._class(value, [(GROUPS[key], 0)], key)

    def _below(self, key: str) -> str:
        """Where an option belongs that was given without the part it is of."""
        owners = {"trainer": (Trainer, 0), **self.classes}
        found = (name for name, (cls, skip) in owners.items() if key in parameters(cls, skip))
        owner = next(found, None)
        return f"; did you mean '{owner}.{key}'?" if owner else ""

    def _arguments(
        self, given: Mapping[str, object], cls: type, prefix: str, skip: int
    ) -> Iterator[str]:
        accepted = parameters(cls, skip)
        for name, value in given.items():
            bare = name.removesuffix("+")
            key = f"{prefix}.{bare}"
            self.seen.add(short(key))
            if bare in accepted:
                yield from self._value(value, key, accepted[bare], name != bare)
                fits = accepts(cls, bare, value, skip)
                yield from self._type(value, key, accepted[bare], fits)
            elif bare != "help":
                place = self.source.place(key)
                yield f"unknown option '{key}' {place}{nearest(bare, accepted)}"

    def _value(self, value: object, key: str, hint: Any, append: bool) -> Iterator[str]:
        """The classes that a value names, and their arguments."""
        bases = class_hints(hint)
        if not bases:
            return
        if is_list(value) or append:
            items = value if is_list(value) else [value]
            start = self.lengths.get(key, 0) if append else 0
            self.lengths[key] = start + len(items)
            for index, item in enumerate(items, start):
                yield from self._class(item, bases, f"{key}.{index}")
        elif is_mapping(value) and not takes_mapping(hint):
            if key in self.lengths and not value.keys() & {*SPEC}:  # of the last item of a list
                key = f"{key}.{self.lengths[key] - 1}"
            yield from self._class(value, bases, key)

    def _type(self, value: object, key: str, hint: Any, fits: bool) -> Iterator[str]:
        bases = class_hints(hint)
        if is_mapping(value) and bases and "class_path" not in value:
            return  # a part of a class's options, checked above
        if isinstance(value, str) and bases and find_class(value, [b for b, _ in bases])[0]:
            yield from self._class(value, bases, key)
            return
        if fits:
            return
        words = literals(hint)
        if bases and isinstance(value, str) and not is_number(hint) and not words:
            yield from self._class(value, bases, key)
        close = did_you_mean(str(value), words)
        yield f"{key} must be {describe(hint)}; got '{value}' {self.source.place(key)}{close}"

    def _class(self, value: object, bases: list[tuple[type, int]], key: str) -> Iterator[str]:
        spec: dict[str, Any] = value if is_mapping(value) else {"class_path": value}
        path = spec.get("class_path")
        if isinstance(path, str):
            label = f"{key}.class_path" if spec is value else key
            place = self.source.place(label)
            cls, why = find_class(path, [base for base, _ in bases])
            if cls is None:
                yield f"unknown class '{path}' for {label} {place}{why}"
                return
            skip = next((n for base, n in bases if issubclass(cls, base)), 0)
            self.classes[short(key)], self.named[key] = (cls, skip), place
        elif fields := next((base for base, _ in bases if is_dataclass(base)), None):
            yield from self._arguments(spec, fields, key, 0)  # it has no class_path
            return
        if short(key) in self.classes:
            cls, skip = self.classes[short(key)]
            self.seen |= {f"{short(key)}.{name}" for name in spec.get("dict_kwargs") or {}}
            inner = {name: v for name, v in spec.items() if name not in SPEC}
            inner = {**(spec.get("init_args") or {}), **inner}
            yield from self._arguments(inner, cls, f"{key}.init_args", skip)


def _last_resort(sources: Sources, message: str) -> UsageError:
    found = re.search(r"""(?:[kK]ey|[oO]ption) ["']([\w.+-]+)["']""", message)
    place = sources.place(found.group(1)) if found else ""
    if unrecognized := re.match(r"unrecognized arguments: (\S+)", message):
        return UsageError(f"unknown option '{unrecognized.group(1)}' {COMMAND_LINE}")
    if missing := re.match(r"argument --([\w.]+)\S*: expected one argument", message):
        return UsageError(f"the option '{missing.group(1)}' has no value {COMMAND_LINE}")
    if given := re.match(r'Parser key "([\w.]+)":\n', message):
        return _of_parser_key(sources, given.group(1), message)
    return UsageError(message.strip() + (f" ({found.group(1)} {place})" if found and place else ""))


def _of_parser_key(sources: Sources, key: str, message: str) -> UsageError:
    """Of the parser's nested text, the option and what was given for it."""
    inner = re.search(r"NestedArg\(key='([\w.]+)', val='?(.*?)'?\)", message)
    if inner:
        key, value = f"{key}.{inner.group(1)}", inner.group(2)
    else:
        value = message.rpartition("Given value: ")[2].strip().partition("\n")[0]
    hint = "a mapping needs a space after each colon" if re.match(r"\{\w+:\S", value) else ""
    return UsageError(f"{key} cannot be '{value}' {sources.place(key)}".rstrip(), hint)
