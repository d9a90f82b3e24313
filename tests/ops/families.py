"""The rule files' tables of cases, and what is asked of each case.

A table is `CASES` of a test file: a name, a function of tensors, and the shapes of the tensors.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests import OLDEST
from tests.ops.dense import test_linear
from tests.ops.elementwise import test_pointwise
from tests.ops.norm import test_batch_norm
from tests.ops.reduce import test_loss, test_softmax, test_sums
from tests.ops.view import (
    test_become,
    test_lookup,
    test_mask,
    test_pixel_shuffle,
    test_reshape,
    test_select,
)
from tests.ops.window import test_conv, test_conv_transpose, test_pool
from tests.parity import assert_double_backward, assert_parity, mesh_of


@dataclass(frozen=True)
class Family:
    """A table, and how its tensors are split.

    Attributes:
        cases: By name a function, and one shape or a list of shapes.
        dims: What three ranks split, one at a time.
        smooth: Cases with a second derivative.
        every_tensor: Whether all tensors are split, not the first alone.
    """

    cases: dict[str, tuple[Callable[..., Any], Any]]
    dims: Sequence[int] = (2, 3)
    smooth: Sequence[str] = ()
    every_tensor: bool = False

    def case(self, name: str) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
        function, shapes = self.cases[name]
        return function, shapes if isinstance(shapes, list) else [shapes]

    def split(self, name: str, dims: Sequence[int]) -> dict[int, Sequence[int]]:
        count = len(self.case(name)[1]) if self.every_tensor else 1
        return dict.fromkeys(range(count), dims)


FAMILIES = {
    "become": Family(test_become.CASES, (1, 2, 3), [*test_become.CASES]),
    "conv": Family(test_conv.CASES),
    "conv_transpose": Family(test_conv_transpose.CASES, (0, 2, 3), test_conv_transpose.SMOOTH),
    "linear": Family(test_linear.CASES, smooth=test_linear.SMOOTH),
    "loss": Family(test_loss.CASES, smooth=test_loss.SMOOTH),
    "loss_of_split_targets": Family(test_loss.CASES, every_tensor=True),
    "lookup": Family(test_lookup.CASES, (0, 2, 3), test_lookup.SMOOTH),
    "mask": Family(test_mask.CASES, (0, 2, 3), test_mask.SMOOTH),
    "norm": Family(test_batch_norm.CASES, (0, 2, 3), test_batch_norm.SMOOTH),
    "pixel_shuffle": Family(test_pixel_shuffle.CASES, (-1, -2), test_pixel_shuffle.SMOOTH),
    "pointwise": Family(test_pointwise.CASES, smooth=test_pointwise.SMOOTH),
    "pool": Family(test_pool.CASES, (0, 1, 2, 3), test_pool.SMOOTH),
    "reshape": Family(test_reshape.CASES, (1, 2, 3), test_reshape.SMOOTH),
    "select": Family(test_select.CASES, smooth=test_select.SMOOTH),
    "softmax": Family(test_softmax.CASES, smooth=test_softmax.SMOOTH),
    "sums": Family(test_sums.CASES, smooth=test_sums.SMOOTH),
}
if OLDEST:
    # torch 2.11 has no derivative of aminmax, no second one of cdist of a tensor with itself, and
    # another sense of an infinite power
    for cases, lacks in ((test_sums, "aminmax"), (test_pool, "lp_infinite")):
        del cases.CASES[lacks]
    for smooth, lacks in ((test_sums, "aminmax"), (test_linear, "distances_among")):
        smooth.SMOOTH.remove(lacks)


def check(
    family: str,
    case: str,
    dims: Sequence[int],
    mesh: Sequence[int],
    make: Callable[..., Any] = mesh_of,
    *,
    twice: bool = False,
) -> None:
    """Outputs and gradients of a case equal those of one process; `make` makes a mesh.

    With `twice` the gradient of a squared gradient norm does.
    """
    function, shapes = FAMILIES[family].case(case)
    if twice:
        assert_double_backward(function, shapes, {0: dims}, make(*mesh))
    else:
        assert_parity(function, shapes, FAMILIES[family].split(case, dims), make(*mesh))


def check_second_gradient(*case: Any, **named: Any) -> None:
    """Check the gradient of a squared gradient norm; the arguments are those of `check`."""
    check(*case, **named, twice=True)


def first_uses(family: str, known: Collection[Any] = ()) -> Iterator[str]:
    """The cases that call a function which is not known, and which no case before them calls."""
    seen: set[Any] = {*known}
    for name in FAMILIES[family].cases:
        function, shapes = FAMILIES[family].case(name)
        inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
        with _Calls() as calls, warnings.catch_warnings(action="ignore"):
            function(*inputs)
        if not calls.functions <= seen:
            yield name
        seen |= calls.functions


class _Calls(TorchFunctionMode):
    """The torch functions that are called while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.add(func)
        return func(*args, **(kwargs or {}))
