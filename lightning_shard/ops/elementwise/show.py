"""Turns split tensors into text, numbers and truth, but never into an array of one part."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import gathered, whole
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.reduce.sums import any_
from lightning_shard.ops.registry import implements, implements_lazily

# asked on each rank before values of a split tensor are handed out; True if they may be gathered
MAY_READ_VALUES: ContextVar[Callable[[Subdomain], bool]] = ContextVar(
    "MAY_READ_VALUES", default=lambda x: False
)


@implements(Tensor.__repr__, checked=False)
@implements_lazily(Tensor.__repr__)
def text(func: Callable[..., str], x: Any, *args: Any, **kwargs: Any) -> str:
    """Show shape, dtype and placement of the whole, and this rank's values; nothing is sent."""
    if not isinstance(x, Subdomain):
        return f"DomainTensor(shape={tuple(x.shape)}, dtype={x.dtype}, a spectrum not computed yet)"
    placement = str(x.layout).partition(", dim")[2]
    local = torch.Tensor.__repr__(x.local, *args, **kwargs)
    whole_of_it = f"shape={x.shape}, dtype={x.dtype}, dim{placement}"
    return f"DomainTensor({whole_of_it}, this rank's part:\n{local})"


@implements(Tensor.__format__, checked=False)
@implements_lazily(Tensor.__format__)
def formatted(func: Callable[..., str], x: Any, spec: str) -> str:
    """Text for an f-string, without a format: shape and split; no values are read."""
    if spec:
        raise TypeError(
            f"unsupported format string {spec!r} for a tensor split over ranks; format item()"
        )
    return text(func, x)


@implements(Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
            Tensor.__complex__, torch.is_nonzero, Tensor.is_nonzero, checked=False)  # fmt: skip
def number(func: Callable[..., Any], x: Subdomain) -> Any:
    """Read the number in a tensor of one element, on every rank."""
    if any(n != 1 for n in x.shape):
        return func(x.local.new_zeros(()).expand(x.shape))  # raises torch's error
    for dim in x.layout.split_dims:
        x = whole(x, dim)
    return func(x.local)


@implements(Tensor.__contains__)
def contains(func: Callable[..., bool], x: Subdomain, element: Any) -> bool:
    """Return True if any rank has the element; one number of each rank travels."""
    found = any_(torch.any, x.like(x.local == element))
    assert isinstance(found, Tensor)
    return bool(found.item())


@implements(
    Tensor.numpy,
    Tensor.__array__,
    Tensor.tolist,
    limits="only in a Trainer's hooks and evaluation: the values lie on several ranks",
    checked=False,
)
def values(func: Callable[..., Any], x: Subdomain, *args: Any, **kwargs: Any) -> Any:
    """Gather the whole tensor where a run hands out its values, as to a logger.

    An array is read-only: a write into it would not reach the split tensor.

    Raises:
        UnsupportedOperationError: Nobody hands out values here, as in a training step.
    """
    if not MAY_READ_VALUES.get()(x):
        refuse_values(func)
    local, device = x.local, x.domain.exchanges_on
    held = (
        device is not None and local.device.type == "cpu" != device
    )  # x.cpu() of a device whose ranks talk
    full = gathered(replace(x, local=local.to(device)) if held else x)
    result = func(full.to(local.device), *args, **kwargs)
    if func is not Tensor.tolist:
        result.flags.writeable = False
    return result


@implements(
    Tensor.__dlpack__,
    Tensor.apply_,
    Tensor.map_,
    limits="never: the values lie on several ranks",
    checked=False,
)
def refuse_values(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse to make an array of one rank's part; nothing travels.

    Raises:
        UnsupportedOperationError: Always.
    """
    raise UnsupportedOperationError(
        "the values lie on several ranks; take lightning_shard.gather(tensor)"
    )
