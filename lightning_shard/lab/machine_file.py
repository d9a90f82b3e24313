"""Reads the file of a machine into its dataclasses, and says what is wrong with another file.

The annotations of the dataclasses are the schema: `Annotated[float, Must(...)]` adds a condition.
"""

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

LARGEST = 1e30  # the largest rate
LONGEST = 200  # the most characters of a text
T = TypeVar("T")


class Must(NamedTuple):
    """A condition on a value that is read from a file.

    Attributes:
        be: The words for a value that meets it.
        test: Returns whether a value does.
    """

    be: str
    test: Callable[[Any], bool]


def is_number(x: Any) -> bool:
    """Return whether `x` is a finite number from 0 on."""
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < LARGEST


def is_whole(x: Any) -> bool:
    """Return whether `x` is a whole number from 0 on."""
    return isinstance(x, int) and is_number(x)


def is_text(x: Any) -> bool:
    """Return whether `x` is a short text that a terminal can show."""
    return isinstance(x, str) and len(x) <= LONGEST and x.isprintable()


_OBJECT = Must("be an object", lambda x: isinstance(x, dict))
_LIST = Must("be a list", lambda x: isinstance(x, list))


def read_as(kind: type[T], path: Path) -> T:
    """Read a dataclass from a JSON file, all entries of which are there and meet their conditions.

    Args:
        kind: The dataclass.
        path: The file.

    Raises:
        ValueError: There is no such file, or it holds something else; in one sentence.
    """
    if not path.is_file():
        raise ValueError(f"there is no file '{path}'; `calibrate` writes one of this machine.")
    try:
        return _read(kind, json.loads(path.read_text(encoding="utf-8")), "")
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(
            f"'{path}' is no file that `calibrate` wrote ({error}); let it write a new one."
        ) from error


def _read(kind: Any, value: Any, place: str) -> Any:
    """Return a value of a JSON file as its type; raise an error that names its place."""
    if is_dataclass(kind):
        return _read_fields(kind, value, place)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated and get_origin(inner[0]) is list:
        rows = _read(inner[0], value, place)
        if not inner[1].test(rows):
            raise ValueError(f"{place} must {inner[1].be}")
        return rows
    if origin is Annotated:
        return _expect(inner[1], value, place)
    if origin is dict:
        _expect(_OBJECT, value, place)
        known = {name: inner[1] for name in value if inner[0].__metadata__[0].test(name)}
        return {name: _read(_known_type(known, name, place), one, f"{place}.{name}")
                for name, one in value.items()}  # fmt: skip
    _expect(_LIST, value, place)
    if origin is list:
        return [_read(inner[0], one, f"{place}[{n}]") for n, one in enumerate(value)]
    _expect(Must(f"be a list of {len(inner)}", lambda x: len(x) == len(inner)), value, place)
    both = zip(inner, value, strict=True)
    return tuple(_read(each, one, f"{place}[{n}]") for n, (each, one) in enumerate(both))


def _read_fields(kind: Any, value: Any, place: str) -> Any:
    _expect(_OBJECT, value, place)
    before = f"{place}." if place else ""
    for each in fields(kind):
        if each.name not in value and each.default is each.default_factory is MISSING:
            raise ValueError(f"{before}{each.name} is missing")
    known = get_type_hints(kind, include_extras=True)
    return kind(**{name: _read(_known_type(known, name, place), one, f"{before}{name}")
                   for name, one in value.items()})  # fmt: skip


def _known_type(known: dict[str, Any], name: str, place: str) -> Any:
    if name not in known:
        raise ValueError(f"{_shown(f'{place}.{name}' if place else name)} is nothing that it holds")
    return known[name]


def _expect(must: Must, value: Any, place: str) -> Any:
    if not must.test(value):
        raise ValueError(f"{place or 'all of it'} is {_shown(value)}, and must {must.be}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
