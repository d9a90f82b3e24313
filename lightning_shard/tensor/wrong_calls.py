"""Asks torch whether it would refuse a call, before any rank computes.

The function runs on meta tensors of the global shapes, which costs neither memory nor arithmetic.
What passes is remembered by function, shapes, dtypes and the other arguments, so a training loop
asks once. What passes is accepted. Two kinds of calls run on zeros and on ones, too:

- What meta tensors refuse, because not every function of torch knows them. What fails there too is
  raised, on every rank alike and with torch's own error. Of two errors of one class the meta
  tensors' is raised where the other may come from a library of the device.
- Calls without floats of 16 bits or more: meta tensors do not know for which dtypes a kernel is
  there. Ranks with rows would raise, and a rank without rows would wait.
"""

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from lightning_shard.processes.torch_private.internals import (
    dual_level,
    forward_ad,
    is_autocast,
    open_modes,
)
from lightning_shard.processes.torch_private.typed import random
from lightning_shard.tensor.gathering import split_in

LARGEST = 2**22  # elements up to which a call runs on zeros
KEPT = 2**14  # calls to remember

# functions that write as many values as a mask chooses
_WRITES_CHOSEN = {
    Tensor.__setitem__, torch.index_put, Tensor.index_put, Tensor.index_put_, torch.index_put_,
    torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_,
}  # fmt: skip
_MASKS = (torch.bool, torch.uint8)

NUMBERS = frozenset([int, float, bool, NoneType])  # classes of most arguments but tensors

_accepted: set[Any] = set()


def refuse_wrong_call(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], kind: type[Tensor]
) -> None:
    """Raise what torch raises for this call in one process, if it does so whatever the values."""
    try:
        key = func, is_autocast(), *[_key(a, kind) for a in args]
        if kwargs:
            key += *kwargs, *[_key(value, kind) for value in kwargs.values()]
        if key in _accepted:
            return
    except TypeError:  # an argument without a hash: whatever it is, torch's kernels see it
        return
    if open_modes():  # someone counts what runs: not this
        return
    if func in _WRITES_CHOSEN and any(t.dtype in _MASKS for t in split_in(args[1:], Tensor)):
        return  # a mask decides how many values it takes
    _try(func, args, kwargs)
    if len(_accepted) >= KEPT:
        _accepted.clear()
    _accepted.add(key)


def _key(value: Any, kind: type[Tensor]) -> Any:
    cls = type(value)
    if cls in NUMBERS:
        return cls, value  # 1, 1.0 and True are equal
    if cls is kind:
        part = value._part
        return part.shape, part.dtype
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if cls is tuple or cls is list:
        kinds = (*map(type, value),)
        if NUMBERS.issuperset(kinds):
            return cls, kinds, (*value,)
        return cls, *[_key(v, kind) for v in value]
    if cls is slice:
        return cls, value.start, value.stop, value.step
    return cls, value


_OF_A_LIBRARY = "memory descriptor"  # oneDNN's words, which say nothing of the arguments
# torch 2.11's words for a transform of bfloat16, also without numbers: the rule decides, which
# serves some under autocast
_OF_A_TRANSFORM = "Unsupported dtype BFloat16"
# a RuntimeError, some in some releases
_OF_THE_DTYPE = (
    "not implemented for", "same dtype", "same scalar type", "does not support", "only support",
)  # fmt: skip


def _try(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    tensors = list(split_in([args, kwargs], Tensor))
    small = sum(t.numel() for t in tensors) <= LARGEST
    refused: Exception | None = None
    try:
        _run(func, args, kwargs, _on_meta)
    except Exception as error:  # any kind: the real function decides below
        if not small and isinstance(error, IndexError | ValueError | TypeError):
            raise
        refused = error.with_traceback(None)  # its frames would hold the tensors
    # rules compute in single precision where a CPU's library knows no such numbers
    known = all(t.dtype != torch.complex32 for t in tensors)
    floats = all(t.is_floating_point() and t.itemsize > 1 for t in tensors)
    if not small or (refused is None and (floats or not known)):
        return
    try:
        with _random_numbers_kept(t.device for t in tensors):
            _run_on_constants(func, args, kwargs)
    except Exception as real:
        if refused is None:  # with other numbers it may run
            is_of_dtype = any(words in str(real) for words in _OF_THE_DTYPE)
            if not (is_of_dtype or isinstance(real, TypeError | NotImplementedError)):
                return
        elif floats and _OF_A_TRANSFORM in str(refused):
            return
        elif type(real) is type(refused) and _OF_A_LIBRARY in str(real):
            raise refused from None
        raise


def _run_on_constants(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Zeros may be any index, and ones any weight."""
    try:
        _run(func, args, kwargs, partial(_full, 0))
    except Exception:  # where ones fail too, their error is raised
        _run(func, args, kwargs, partial(_full, 1))


def _run(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    make: Callable[[Tensor], Tensor],
) -> None:
    def stand_in(value: Any) -> Any:
        if type(value) is Tensor and value.ndim == 0 and not value.is_floating_point():
            return value.clone()  # may be a size, as in x.view(n, -1)
        if isinstance(value, Tensor):
            return make(value)
        if isinstance(value, torch.Generator):  # the user's, who wants its numbers
            return value.clone_state()
        return type(value)(map(stand_in, value)) if type(value) in (list, tuple) else value

    with torch.no_grad(), _without_dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        func(*map(stand_in, args), **{name: stand_in(v) for name, v in kwargs.items()})


@contextmanager
def _without_dual_level() -> Generator[None]:
    """Let no `dual_level` be open meanwhile: the tensors have no tangents.

    While one is open torch 2.15 cannot print a tensor inside of an operator, as it does where it
    looks for an overload. Its error keeps a guard in a frame, and where that ends, the thread
    records no graph any more.
    """
    level = dual_level()
    vars(forward_ad)["_current_level"] = -1
    try:
        yield
    finally:
        vars(forward_ad)["_current_level"] = level


def _full(number: int, x: Tensor) -> Tensor:
    return torch.full(tuple(x.shape), number, dtype=x.dtype, device=x.device)


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")


def _random_numbers_kept(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Afterwards the generators of random numbers are where they were."""
    other = next((d for d in devices if d.type not in ("cpu", "meta")), None)
    if other is None:
        return random.fork_rng(devices=[])
    return random.fork_rng(devices=[other.index], device_type=other.type)
