"""What the user gave: each option with the file and line, the variable or the word it comes from.

Sources are read before the parser runs, so that a missing file, a mistake in YAML or a misplaced
subcommand is reported here, and so that a later error can name the place. The parser merges them;
nothing here does.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lightning_shard.cli.usage import ENV_PREFIX, UsageError, is_list, is_mapping, nearest
from lightning_shard.cli.yaml_places import Places, read_yaml, scalar_or_tree

OWN_VARIABLES = ("TRACEBACK", "SUBCOMMAND", "CONFIG", "LAUNCHER", "CPU_SETTINGS")
SPEC = ("class_path", "init_args", "dict_kwargs")
COMMAND_LINE = "on the command line"


@dataclass(frozen=True)
class Source:
    """Options that were written in one place.

    Attributes:
        options: The options, nested as in a file.
        where: The place in words: "at a.yaml:3", "on the command line".
        places: The place of each key of a file.
    """

    options: dict[str, object]
    where: str
    places: Places = field(default_factory=dict[str, str])

    @cached_property
    def flat(self) -> dict[str, object]:
        """Every value, parts of others too, by its dotted key without `init_args`."""
        found: dict[str, object] = {}
        for key, value in _values(self.options, ()):
            found.setdefault(key, value)
        return found

    def place(self, key: str) -> str:
        """Where a dotted key was written."""
        return self.places.get(short(key), self.where)


@dataclass(frozen=True)
class Sources:
    """All sources in the order in which the parser takes them; later ones win."""

    given: tuple[Source, ...] = ()

    def place(self, key: str) -> str:
        """Where a dotted key was written last; empty if it was not."""
        return next((source.place(key) for source in self._with(key)), "")

    def value(self, key: str, default: object = None) -> object:
        """What was written last for a dotted key."""
        return next((source.flat[short(key)] for source in self._with(key)), default)

    def words(self) -> set[str]:
        """All texts that were written anywhere."""
        return {v for source in self.given for v in source.flat.values() if isinstance(v, str)}

    def mentioned(self, text: str) -> list[str]:
        """The options that a sentence names by the last part of their key, with their places."""
        words = {*re.findall(r"\w+", text)}
        options = {k for source in self.given for k, v in source.flat.items() if not is_mapping(v)}
        keys = sorted(key for key in options if "." in key and not re.search(r"\.\d", key))
        return [f"{key} {self.place(key)}" for key in keys if key.rpartition(".")[2] in words]

    def __contains__(self, key: str) -> bool:
        return bool(self.place(key))

    def _with(self, key: str) -> list[Source]:
        return [source for source in reversed(self.given) if short(key) in source.flat]


def _values(value: object, key: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    yield ".".join(key), value
    parts = value.items() if is_mapping(value) else enumerate(value) if is_list(value) else ()
    for name, part in parts:
        yield from _values(part, key if name in SPEC[1:] else (*key, str(name)))


def short(key: str) -> str:
    """A dotted key without `init_args`, which the parser lets the user leave out."""
    return ".".join(part for part in key.split(".") if part not in SPEC[1:])


def read_sources(args: Sequence[str], subcommand: str) -> Sources:
    """Read environment, config files and the options that follow the subcommand."""
    return Sources((*_variables(subcommand), *_words(args)))


def check_variables(subcommands: Sequence[str], keys: Iterable[str]) -> None:
    """Refuse a variable of the environment that would change nothing.

    Args:
        subcommands: The names of all subcommands.
        keys: The dotted options that a variable can give.

    Raises:
        UsageError: A variable begins as ours do, and names no option.
    """
    known = {key.upper().replace(".", "__") for key in keys} | {"CONFIG"}
    for name in os.environ:
        if not name.startswith(f"{ENV_PREFIX}_"):
            continue
        rest = name.removeprefix(f"{ENV_PREFIX}_")
        command, separator, key = rest.partition("__")
        if separator and command.lower() in subcommands:
            rest, choices, start = key, known, f"{ENV_PREFIX}_{command}__"
        else:
            choices, start = {*OWN_VARIABLES}, f"{ENV_PREFIX}_"
        if rest not in choices:
            close = nearest(rest, choices, "its options are", quote=lambda n, s=start: s + n)
            raise UsageError(f"the variable {name} names no option{close}")


def _variables(subcommand: str) -> Iterator[Source]:
    prefix = f"{ENV_PREFIX}_{subcommand.upper()}__"
    for name, value in os.environ.items():
        if name == prefix + "CONFIG":
            yield _file(value)
        elif name.startswith(prefix):
            key = name.removeprefix(prefix).lower().replace("__", ".")
            yield _option(key, value, f"in the variable {name}")


def _words(args: Sequence[str]) -> Iterator[Source]:
    words = list(args)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            raise UsageError(f"unexpected '{word}' {COMMAND_LINE}: options are --key value")
        if re.fullmatch(r"-\w[\w-]+(\..*|=.*|)", word):
            raise UsageError(f"unknown option '{word}' {COMMAND_LINE}; did you mean '-{word}'?")
        option, equals, value = word.partition("=")
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        if option in ("-c", "--config"):
            if not value:
                raise UsageError(f"the option 'config' has no value {COMMAND_LINE}")
            yield _file(value)
        elif option.startswith("--"):
            yield _option(option[2:], value, COMMAND_LINE)


def _file(path: str) -> Source:
    options, places = read_yaml(path)
    return Source(options, f"at {path}", places)


def _option(key: str, text: str, where: str) -> Source:
    places: Places = {}
    if text.endswith((".yaml", ".yml")) and Path(text).is_file():
        value, inner = read_yaml(text)
        places = {f"{short(key)}.{name}": place for name, place in inner.items()}
    else:
        value = scalar_or_tree(text, where)
    nested: object = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    assert is_mapping(nested)
    return Source(nested, where, places)
