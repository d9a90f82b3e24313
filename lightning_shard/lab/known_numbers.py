"""Knows what a step asks of numbers that are not there: whether they are finite.

Steps ask it to stop at a loss that is none, to skip an update, or in `detect_anomaly`. The numbers
of a planned step are finite. So tensors of such answers, and what is made of them, have known
numbers.
"""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lightning_shard.processes.torch_private.internals import FakeTensor, tree_leaves, version_of

_NAME = "_number_of_all"  # an attribute of fake tensors whose elements are one known number

_SAME = frozenset({
    "_is_all_true", "_is_any_true", "_to_copy", "_unsafe_view", "alias", "all", "amax", "amin",
    "any", "cat", "clone", "detach", "expand", "lift_fresh", "max", "mean", "min", "permute",
    "reshape", "select", "slice", "squeeze", "stack", "t", "transpose", "unsqueeze", "view",
})  # fmt: skip
_OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "bitwise_and": min, "bitwise_or": max, "eq": operator.eq,
    "ge": operator.ge, "gt": operator.gt, "le": operator.le, "logical_and": min, "logical_or": max,
    "lt": operator.lt, "mul": operator.mul, "ne": operator.ne,
}  # fmt: skip
_SCALER = "_amp_foreach_non_finite_check_and_unscale_"


def known_number(x: Tensor) -> float | None:
    """Return the number of all elements of a fake tensor, if it is known."""
    number, version = getattr(x, _NAME, (None, 0))
    return number if version == version_of(x) else None


def learn(func: Any, args: Any, given: list[Tensor], out: Any) -> None:
    """Note the number of what an operator made of fake tensors, if it is known."""
    name = func.overloadpacket.__name__
    if name == _SCALER:  # torch counts its write as it returns
        setattr(args[1], _NAME, (0.0, version_of(args[1]) + 1))
    elif isinstance(out, FakeTensor) and not any(out is x for x in given):
        number = _number(name, args, given, out)
        if number is not None:
            setattr(out, _NAME, (float(number), version_of(out)))


def _number(name: str, args: Any, given: list[Tensor], out: Tensor) -> float | None:
    if name in ("isnan", "isinf"):
        return 0
    if name in ("eq", "ne") and _asks_for_finite(*args[:2]):
        return (name == "eq") == (args[0] is args[1])
    numbers = [known_number(x) for x in given]
    known = [number for number in numbers if number is not None]
    if not known or len(known) < len(numbers):
        return None
    if name in _SAME:
        return known[0] if len({*known}) == 1 else None
    if name in ("logical_not", "bitwise_not"):
        return not known[0]
    if name == "sum":
        return known[0] * given[0].numel() / max(1, out.numel())
    if name in _OF_TWO and len(operands := [*_numbers(args[:2])]) == 2:
        return _OF_TWO[name](*operands)
    return None


def _asks_for_finite(x: Any, other: Any) -> bool:
    """Return whether a comparison finds numbers that are none, or infinite."""
    return x is other or (isinstance(other, float) and not math.isfinite(other))


def _numbers(operands: Iterable[Any]) -> Iterable[Any]:
    for x in tree_leaves(operands):
        yield known_number(x) if isinstance(x, Tensor) else x
