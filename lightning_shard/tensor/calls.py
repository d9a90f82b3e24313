"""Counts the functions that are called with split tensors, and adds up the numbers they are given.

Ranks that share samples call the same functions with the same numbers. One whose own generator or
clock gives it another factor computes another network on its rows.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from math import isfinite
from numbers import Number
from typing import Any, cast

import torch
from torch import Tensor

from lightning_shard.ops.registry import changes_first
from lightning_shard.processes.torch_private.internals import in_transform

_PLACES = 64  # read of a plain tensor


class Calls:
    """Notes the calls of this rank since it last began.

    Attributes:
        counts: The number of calls of each function.
        reads_numbers: True to add up numbers and plain tensors, which takes some small kernels for
            each tensor.
    """

    def __init__(self) -> None:
        """Begin without calls."""
        self.counts = Counter[Any]()
        self.reads_numbers = False
        self._numbers = defaultdict[Any, float](float)
        self._of_tensors: list[tuple[Any, Tensor]] = []

    def clear(self) -> None:
        """Forget all calls."""
        self.counts.clear()
        self._numbers.clear()
        self._of_tensors.clear()

    def note(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> None:
        """Note a call, before it runs.

        Args:
            function: A function of torch, of which an argument is a split tensor.
            args: Its arguments.
            kwargs: Its named arguments.
        """
        self.counts[function] += 1
        if self.reads_numbers and not in_transform():
            self._note_all(function, args, kwargs)

    def _note_all(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> None:
        written = 1 if changes_first(function, args, kwargs) else 0  # its values may be none yet
        for arg in (*args[written:], *(value for name, value in kwargs.items() if name != "out")):
            for each in arg if isinstance(arg, tuple | list) else (arg,):
                self._note(function, each)

    def _note(self, function: Callable[..., Any], value: Any) -> None:
        if isinstance(value, Number):  # Python's or NumPy's
            number = complex(cast("complex", value))
            size = abs(number) + number.real / 2 + number.imag / 4
            self._numbers[function] += size if isfinite(size) else 0.0
        elif isinstance(value, slice):
            for end in (value.start, value.stop, value.step):
                self._note(function, end)
        elif type(value) is Tensor and (size := weighted_sum(value)) is not None:
            self._of_tensors.append((function, size))

    def sums(self) -> dict[Any, float]:
        """Return for each function the sum of what it was given, weighted by sign and place."""
        found = {function: self._numbers[function] for function in self.counts}
        for function, size in self._of_tensors:  # perhaps of several devices
            found[function] += float(size)
        return found


def some_values(x: Tensor) -> Tensor:
    """Return a view of about 64 values of a tensor, as many along each dim."""
    rows = max(2, round(_PLACES ** (1 / max(x.ndim, 1))))
    return x[tuple(slice(None, None, max(1, -(-n // rows))) for n in x.shape)]


def weighted_sum(x: Tensor) -> Tensor | None:
    """Sum about 64 values of a tensor, weighted by their signs and places.

    Returns:
        A scalar on the device of the tensor; None for a tensor that has no values.
    """
    if x.layout != torch.strided or x.device.type == "meta" or not x.numel():
        return None
    values = some_values(x.detach()).reshape(-1)
    values = values.to(torch.complex64 if values.is_complex() else torch.float32)
    sizes = values.abs() + (values.real if values.is_complex() else values) / 2
    places = torch.linspace(1, 2, len(values), dtype=torch.float32, device=x.device)
    return (torch.nan_to_num(sizes, 0, 0, 0) * places).sum()


# where calls are noted; None outside of the steps of a training
counted_calls: ContextVar[Calls | None] = ContextVar("counted_calls", default=None)
