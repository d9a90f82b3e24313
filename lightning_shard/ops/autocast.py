"""Gives operands the types in which autocast runs a function, for rules that compute it otherwise.

A rule that calls the function itself on its own rows has what torch casts. A rule that computes a
function out of others would have each of these cast, and torch casts none inside of a function. So
such a rule asks for the types of the function's operands, and then computes without autocast. Which
functions are cast differs between devices: sums are in float32 on a GPU only, and Fourier
transforms on the CPU only (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference).
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.torch_private.internals import without_modes

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(x: Subdomain | Tensor) -> AbstractContextManager[Any]:
    """Functions on the device of `x` run in the types of their operands."""
    kind = _local(x).device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def uncast(rule: Callable[P, R]) -> Callable[P, R]:
    """Wrap a rule to run `without_autocast`: its operands are cast before, or never."""

    @functools.wraps(rule)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Subdomain))
        with without_autocast(first):
            return rule(*args, **kwargs)

    return run


def cast_for(call: Callable[..., Tensor], *operands: Any) -> list[Any]:
    """Cast the operands to the types in which autocast would give them to a function.

    Args:
        call: The function for operands of one element each, with as many dims as these have. It is
            asked once for each combination of types.
        operands: Split and plain tensors; None where one is left out at the end. Autocast leaves
            those of integers, of complex numbers and of float64 as they are.
    """
    device = _local(operands[0]).device
    if not torch.is_autocast_enabled(device.type):
        return [*operands]
    kinds = tuple([(x.ndim, x.dtype) for x in operands if x is not None])
    dtype = _type_of(call, kinds, device, torch.get_autocast_dtype(device.type))
    return [x if dtype is None else _cast(x, dtype) for x in operands]


@functools.cache
def of_one(func: Callable[..., Any], *options: Any) -> Callable[..., Tensor]:
    """Return the function with options that one element can have, as `cast_for` takes it."""

    def call(*operands: Tensor) -> Tensor:
        found = func(*operands, *options)
        return found if isinstance(found, Tensor) else found[0]

    return call


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if x is None or not x.dtype.is_floating_point or x.dtype == torch.float64:
        return x
    return x.alike(x.local.to(dtype)) if isinstance(x, Subdomain) else x.to(dtype)


def _local(x: Subdomain | Tensor) -> Tensor:
    return x.local if isinstance(x, Subdomain) else x


def forget_types() -> None:
    """Ask again in which types autocast runs functions, where it has changed what it does."""
    _type_of.cache_clear()


@functools.lru_cache(maxsize=1024)
def _type_of(
    call: Callable[..., Tensor],
    kinds: tuple[tuple[int, torch.dtype], ...],
    device: torch.device,
    narrow: torch.dtype,
) -> torch.dtype | None:
    """In which type autocast runs the function; None if it leaves the operands alone."""
    with without_modes():  # fake tensors would log a traceback where types differ
        ones = [torch.ones([1] * ndim, dtype=dtype, device=device) for ndim, dtype in kinds]
        found = call(*ones).dtype
        try:
            with torch.autocast(device.type, enabled=False):
                return None if call(*ones).dtype == found else found
        except RuntimeError:  # the types differ, and only autocast makes them alike
            return found
