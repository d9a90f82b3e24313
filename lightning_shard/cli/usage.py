"""A mistake in what was typed, in one sentence that names the nearest valid word."""

import difflib
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from lightning_shard.processes.errors import LightningShardError

SHORT_LIST = 12


class UsageError(LightningShardError):
    """A mistake in what the user typed: one sentence, and perhaps a hint for a second line."""

    def __init__(self, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.hint = hint


@contextmanager
def told_by_user(*kinds: type[Exception]) -> Generator[None]:
    """Take errors of these kinds for mistakes in what was typed; their sentence says enough.

    Raises:
        UsageError: In the place of such an error.
    """
    try:
        yield
    except kinds as err:
        raise UsageError(str(err).rstrip(".")) from err


def nearest(
    name: str,
    choices: Iterable[str],
    label: str = "accepted here:",
    quote: Callable[[str], str] = str,
) -> str:
    """The end of a sentence: the nearest valid name, or the choices when they are few.

    Args:
        name: What was typed.
        choices: The valid names.
        label: What stands before the list of choices.
        quote: How the nearest name is shown, for example as a path.
    """
    names = sorted(set(choices))
    listed = f"; {label} {', '.join(names)}" if names and len(names) <= SHORT_LIST else ""
    return did_you_mean(name, names, quote) or listed


def did_you_mean(name: str, choices: Iterable[str], quote: Callable[[str], str] = str) -> str:
    """The end of a sentence: the nearest valid name; empty where none is near."""
    lower = {candidate.lower(): candidate for candidate in choices}
    close = difflib.get_close_matches(name.lower(), lower, 1, 0.6)
    return f"; did you mean '{quote(lower[close[0]])}'?" if close else ""


def nearest_file(path: Path, pattern: str = "*") -> str:
    """The end of a sentence on a file that is not there: the nearest name in its folder."""
    found = [p.name for p in path.parent.glob(pattern)] if path.parent.is_dir() else []
    return nearest(path.name, found, f"{path.parent} has", lambda n: str(path.parent / n))


def labelled(name: str, value: object) -> str:
    """A line for a terminal."""
    return f"{name:<16}{value}"


def printable(text: str) -> str:
    """Write out characters that command a terminal; a file of a stranger may hold them."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)


def is_mapping(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value of YAML or JSON is a mapping; its keys are strings."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether a value of YAML or JSON is a list."""
    return isinstance(value, list)
