"""Reads the file of a machine that `calibrate` measured, and says what is wrong with another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_DEVICES = 16_384  # of which one step takes about a minute to predict
LARGEST = 1e30  # of a rate
LONGEST = 200  # characters of a text
Check = Callable[[Any, str], None]  # of a value, and its place in the file


def read_machine(path: Path) -> dict[str, Any]:
    """Read the entries of the file, all of which are there and can be what they say.

    Args:
        path: Of a JSON file.

    Raises:
        ValueError: There is no such file, or it is of something else; in one sentence.
    """
    if not path.is_file():
        raise ValueError(f"there is no file '{path}'; `calibrate` writes one of this machine.")
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        _MACHINE(given, "")
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(
            f"'{path}' is no file that `calibrate` wrote ({error}); let it write a new one."
        ) from error
    return given


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _is(what: str, test: Callable[[Any], bool]) -> Check:
    def check(value: Any, place: str) -> None:
        if not test(value):
            raise ValueError(f"{place or 'all of it'} is {_shown(value)}, and must be {what}")

    return check


def _object(needed: dict[str, Check], more: dict[str, Check] | None = None) -> Check:
    known = needed | (more or {})

    def check(value: Any, place: str) -> None:
        _is("an object", lambda x: isinstance(x, dict))(value, place)
        before = f"{place}." if place else ""
        if missing := [name for name in needed if name not in value]:
            raise ValueError(f"{before}{missing[0]} is missing")
        for name, each in value.items():
            if name not in known:
                raise ValueError(f"{_shown(before + name)} is nothing that it holds")
            known[name](each, f"{before}{name}")

    return check


def _list(each: Check) -> Check:
    def check(value: Any, place: str) -> None:
        _is("a list", lambda x: isinstance(x, list))(value, place)
        for number, one in enumerate(value):
            each(one, f"{place}[{number}]")

    return check


def _row(*checks: Check) -> Check:
    def check(value: Any, place: str) -> None:
        _is(f"a list of {len(checks)}", lambda x: isinstance(x, list) and len(x) == len(checks))(
            value, place
        )
        for number, (test, one) in enumerate(zip(checks, value, strict=True)):
            test(one, f"{place}[{number}]")

    return check


def _growing(each: Check, least: int = 0) -> Check:
    def check(value: Any, place: str) -> None:
        _list(each)(value, place)
        sizes = [row[0] for row in value]
        if sizes != sorted({*sizes}) or len(sizes) < least:
            raise ValueError(f"{place} must have {least} sizes or more, each larger than the last")

    return check


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < LARGEST


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


_TEXT = _is("a short text", lambda x: isinstance(x, str) and len(x) <= LONGEST and x.isprintable())
_TIME = _is("a number from 0 on", _is_number)
_RATE = _is("a number above 0", lambda x: _is_number(x) and x > 0)
_BYTES = _is("a whole number from 0 on", lambda x: _is_whole(x) and _is_number(x))
_COUNT = _is(
    f"a whole number from 1 to {MOST_DEVICES}", lambda x: _is_whole(x) and 1 <= x <= MOST_DEVICES
)
_LINK = _object({"bandwidth": _RATE, "latency": _TIME})
_OTHER_RATES: dict[str, Check] = dict.fromkeys(("float64", "tf32", "bfloat16", "float16"), _RATE)
_KERNEL = _object({}, _OTHER_RATES | {"float32": _RATE})
_KERNELS = (
    "convolution", "convolution_backward", "thin_convolution", "thin_convolution_backward", "fft",
)  # fmt: skip
_DEVICE = _object(
    {
        "name": _TEXT,
        "memory": _BYTES,
        "flops": _object({"float32": _RATE}, _OTHER_RATES),
        "bandwidth": _RATE,
        "per_call": _RATE,
        "source": _TEXT,
    },
    {
        "kernels": _object({}, dict.fromkeys(_KERNELS, _KERNEL)),
        "bandwidths": _growing(_row(_RATE, _RATE)),
    },
)
_MACHINE = _object(
    {"device": _DEVICE, "per_node": _COUNT, "nodes": _COUNT, "inside": _LINK, "between": _LINK},
    {
        "price": _is("a number above 0, or null", lambda x: x is None or (_is_number(x) and x > 0)),
        "collectives": _list(_row(_TEXT, _COUNT, _growing(_row(_BYTES, _TIME, _TIME), least=2))),
    },
)
