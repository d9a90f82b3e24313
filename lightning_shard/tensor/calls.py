"""Counts the functions that are called with split tensors, and keeps what they are given.

Ranks that share samples call the same functions with the same numbers, on the results of the same
calls. One whose own generator or clock gives it another factor, or chooses another branch, computes
another network on its rows.
"""

import cmath
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from numbers import Integral, Number
from typing import Any, SupportsComplex, cast

import numpy as np
import torch
from torch import Tensor, nn

from lightning_shard.ops.registry import changes_first, name_of
from lightning_shard.processes.device import DEVICES
from lightning_shard.processes.torch_private.internals import accessors, in_transform
from lightning_shard.tensor.gathering import split_in

_PLACES = 64, 2**14  # read of a tensor: a few, and more, among them a box or a sensor
_LATEST = 1000  # calls, of which the order is kept
RELATIVE = 1e-4  # kernels of the ranks may round otherwise
_INTEGERS = {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
             torch.int8, torch.int16, torch.int32, torch.int64}  # fmt: skip
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_READ = {
    **dict.fromkeys(_INTEGERS, torch.int64),
    **dict.fromkeys(_FLOATS, torch.float32),
    **dict.fromkeys(_COMPLEX, torch.complex64),
}
# each rank has a device of its own
_NAME_DEVICES = {Tensor.to, *(getattr(Tensor, row.type, None) for row in DEVICES)}
# they read no value of the second tensor, which may have none
_LIKE_ANOTHER = {Tensor.view_as, Tensor.expand_as, Tensor.reshape_as, Tensor.type_as}
_MADE_BY = "_made_by"  # the name of the call, or of the batch, that a split tensor is of
ONLY_LOOK = {  # one rank alone may do so
    Tensor.__repr__,
    Tensor.__format__,
    Tensor.detach,
    Tensor.clone,  # and the others that copy: what is done with a copy is compared
    Tensor.cpu,
    accessors("data").__get__,
    accessors("grad").__get__,
    Tensor.register_hook,
    Tensor.retain_grad,
}


class Calls:
    """Notes the calls of this rank since it last began.

    Attributes:
        counts: The number of calls of each function.
        reads_numbers: True to keep numbers, words and sums of tensors, which take some small
            kernels for each tensor, and which calls have made the split tensors.
    """

    def __init__(self) -> None:
        """Begin without calls."""
        self.counts = Counter[Any]()
        self.reads_numbers = False
        self._given = defaultdict[Any, list[Any]](list)
        self._makers = defaultdict[Any, list[str]](list)
        self._begun = 0  # how often calls were forgotten
        # each entry has how often calls were forgotten, its number since, and what was called: a
        # thread may look while this one goes on, so that one entry says all
        self._order = deque[tuple[int, int, Any, list[Any]]](maxlen=_LATEST)

    def clear(self) -> None:
        """Forget all calls."""
        self.counts.clear()
        self._given.clear()
        self._makers.clear()
        self._begun += 1
        self._order.clear()

    def note(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> str:
        """Note a call, before it runs.

        Args:
            function: A function of torch, of which an argument is a split tensor.
            args: Its arguments.
            kwargs: Its named arguments.

        Returns:
            A name of the call, which is the same on all ranks.
        """
        self.counts[function] += 1
        reads = self.reads_numbers and not in_transform()
        tensors = split_in([args, kwargs], Tensor) if reads else ()
        makers = [maker for x in tensors if (maker := getattr(x, _MADE_BY, ""))]
        if function in ONLY_LOOK:
            return f"a copy of {makers[0]}" if makers else ""
        values = list[Any]()
        if reads:
            # under no_grad on one rank its rows would have no part in the gradient
            how = "" if torch.is_grad_enabled() else " without gradients"
            self._makers[function] += [f"{maker}{how}" for maker in makers]
            _collect(_read_of(function, args, kwargs), values)
            self._given[function] += values
        number = self._order[-1][1] + 1 if self._order else 1
        exact = [value for value in values if isinstance(value, int | str)]
        self._order.append((self._begun, number, function, exact))
        return f"call {self.counts[function]} of {name_of(function)}" if reads else ""

    def latest(self) -> tuple[int, int, list[str]]:
        """Return how often calls were forgotten, their number since, and the last, as words."""
        noted = [*self._order]
        begun, number, _, _ = noted[-1] if noted else (self._begun, 0, None, None)
        words = [f"{name_of(function)} {exact or ''}".strip() for *_, function, exact in noted]
        return begun, number, words

    def makers(self) -> dict[Any, list[str]]:
        """Return the names of the calls that made the split tensors given to each function."""
        return {function: self._makers[function] for function in self.counts}

    def given(self) -> dict[Any, list[Any]]:
        """Return what each function was given, in the order of its calls."""
        found = {function: list[Any]() for function in self.counts}
        for function, values in self._given.items():
            for value in values:
                found[function].append(value.item() if isinstance(value, Tensor) else value)
        return found


def _read_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Sequence[Any]:
    """Return the arguments of a call whose values are the same on all ranks, and are read."""
    if function in _LIKE_ANOTHER:
        return args[:1]
    # memory that is written, or added times nought, may have no values
    unread = changes_first(function, args, kwargs) or kwargs.get("beta") == 0
    named = (value for name, value in kwargs.items() if name not in ("out", "device"))
    values = (*args[1 if unread else 0 :], *named)
    if function in _NAME_DEVICES:
        return [value for value in values if isinstance(value, torch.dtype)]
    return values


def name_makers(tensors: Iterable[Tensor], name: str) -> None:
    """Note on split tensors which call has made them, or that they are of a batch."""
    for place, x in enumerate(tensors):
        setattr(x, _MADE_BY, f"tensor {place} of {name}")


def _collect(values: Sequence[Any], into: list[Any]) -> None:
    """Add what values say of the numbers of a call: themselves, or sums of tensors."""
    for value in values:
        if isinstance(value, str | torch.dtype):
            into.append(str(value))
        elif isinstance(value, Integral):
            into.append(int(value))
        elif isinstance(value, Number):  # Python's or NumPy's
            number = complex(cast("SupportsComplex", value))
            into.append(number if cmath.isfinite(number) else 0.0)
        elif isinstance(value, slice):
            _collect((value.start, value.stop, value.step), into)
        elif isinstance(value, tuple | list):
            _collect(value, into)
        elif isinstance(value, np.ndarray | np.generic):
            _collect((_tensor_of(value),), into)
        elif type(value) in (Tensor, nn.Parameter):
            into.extend(weighted_sums(value))


def _tensor_of(array: np.ndarray | np.generic) -> Tensor | int:
    """Return an array's numbers as a tensor, which may be rounded, or else a checksum."""
    dtype = {"f": np.float64, "c": np.complex128}.get(array.dtype.kind)
    return (
        zlib.crc32(array.tobytes()) if dtype is None else torch.from_numpy(np.array(array, dtype))
    )


def weighted_sums(x: Tensor) -> list[Tensor]:
    """Sum values of a tensor, weighted by their signs and places: a few of them, and more.

    Returns:
        Scalars on the device of the tensor, integers of integers; none for a tensor that has no
        values, or of a kind that does not add up.
    """
    if x.layout != torch.strided or x.is_nested or x.device.type == "meta":
        return []
    dtype = _READ.get(x.dtype)
    if dtype is None or not x.numel() or not x.untyped_storage().size():
        return []
    few, _ = _PLACES
    return [_weighted_sum(x.detach(), dtype, n) for n in _PLACES[: 2 if x.numel() > few else 1]]


def _weighted_sum(x: Tensor, dtype: torch.dtype, places: int) -> Tensor:
    values = some_values(x, places).to(dtype)
    if dtype == torch.int64:
        return (values * torch.arange(1, len(values) + 1, device=x.device)).sum()
    sizes = values.abs() + (values.real if values.is_complex() else values) / 2
    weights = torch.linspace(1, 2, len(values), dtype=torch.float32, device=x.device)
    return (torch.nan_to_num(sizes, 0, 0, 0) * weights).sum()


def some_values(x: Tensor, places: int) -> Tensor:
    """Return about so many values, in one dim: those of some rows of each dim, which are a view."""
    left, steps = float(places), dict[int, int]()
    for n, dim in sorted((n, dim) for dim, n in enumerate(x.shape)):  # short dims are read whole
        rows = min(n, max(1, round(left ** (1 / (x.ndim - len(steps))))))
        steps[dim] = -(-n // rows)
        left /= -(-n // steps[dim])
    return x[tuple(slice(None, None, steps[dim]) for dim in range(x.ndim))].reshape(-1)


def alike(here: Sequence[Any], there: Sequence[Any]) -> bool:
    """Return True if two ranks have given a function the same, apart from rounding."""
    return len(here) == len(there) and all(map(_is_same, here, there))


def _is_same(here: Any, there: Any) -> bool:
    rounded = all(isinstance(value, float | complex) for value in (here, there))
    return here == there or (rounded and cmath.isclose(here, there, rel_tol=RELATIVE))


# where calls are noted; None outside of the steps of a training
counted_calls: ContextVar[Calls | None] = ContextVar("counted_calls", default=None)
