"""Finds which values there are, and how often: each rank counts its own and tells the others.

Counts in bins are added up by one all-reduce. Distinct values are put together on every rank: where
they are asked for they are few, and programs loop over them. The first elements of runs of equal
ones, which may be many, stay split.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import common_layout, local_part, subdomains, sum_over
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.uneven import exchange_rows, spans_of, told_to_all
from lightning_shard.ops.reduce.extreme import extreme
from lightning_shard.ops.registry import composes, implements
from lightning_shard.processes.typed import typed_torch


@implements(torch.histc, Tensor.histc)
def histc(
    func: Callable[..., Tensor],
    x: Subdomain,
    bins: int = 100,
    min: float = 0,  # noqa: A002 - torch's names of the arguments
    max: float = 0,  # noqa: A002
) -> Tensor:
    """Count in `bins` equal bins, on every rank; the default range is that of all values."""
    low, high = float(min), float(max)
    if low == high and 0 not in x.shape:
        ends = [extreme(pick, x) for pick in (torch.amin, torch.amax)]
        low, high = (float(e.detach()) for e in ends if isinstance(e, Tensor))
    if low == high:
        low, high = low - 1, high + 1
    counts = func(x.local.reshape(-1), bins, low, high)
    return sum_over(x, counts, range(x.ndim))


@implements(torch.bincount, Tensor.bincount)
def bincount(
    func: Callable[..., Tensor],
    x: Subdomain | Tensor,
    weights: Subdomain | Tensor | None = None,
    minlength: int = 0,
) -> Tensor:
    """Count the numbers 0, 1, ..., on every rank, or add up their weights."""
    operands = [x] if weights is None else [x, weights]
    layout = common_layout(operands)
    owner = subdomains(operands)[0]
    numbers = owner.like(local_part(x, layout), layout)
    own = None if weights is None else local_part(weights, layout)
    ends = [extreme(pick, numbers) for pick in (torch.amin, torch.amax)] if x.shape[0] else []
    least, largest = (int(e) for e in ends if isinstance(e, Tensor)) if ends else (0, -1)
    if least < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    counts = func(numbers.local, own, max(minlength, largest + 1))
    if own is not None and x.shape[0]:  # of no numbers torch makes integers, whatever the weights
        counts = counts.to(torch.float32 if own.dtype == torch.float32 else torch.float64)
    return sum_over(numbers, counts, [0])


@implements(typed_torch.unique, Tensor.unique, limits="no dim")
def unique(
    func: Callable[..., Any],
    x: Subdomain,
    sorted: bool = True,  # noqa: A002 - torch's names of the arguments
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Find the distinct values of all ranks, sorted, and how often each occurs: plain tensors.

    The inverse is split as `x` is: each element's place among the values.
    """
    if dim is not None:
        raise UnsupportedOperationError("distinct slices along a dim; leave dim out")
    own, numbers = typed_torch.unique(x.local, return_counts=True)
    group = x.domain.group(x.layout.axes())
    owned = spans_of(told_to_all(len(own), group))
    whole = [(0, owned[-1][1])] * len(owned)
    found = exchange_rows(own, 0, owned, whole, group)
    values, places = typed_torch.unique(found, return_inverse=True)
    result: list[Any] = [values]
    if return_inverse:
        if x.dtype.is_floating_point and bool(values.isnan().any()):
            raise UnsupportedOperationError("places of NaN, of which each is a value of its own")
        if x.dtype == torch.bool:
            place = torch.searchsorted(values.int(), x.local.int())
        else:
            place = torch.searchsorted(values, x.local.contiguous())
        result.append(x.like(place))
    if return_counts:
        numbers = exchange_rows(numbers, 0, owned, whole, group)
        counts = torch.zeros(len(values), dtype=torch.long, device=values.device)
        result.append(counts.index_add_(0, places, numbers))
    return tuple(result) if len(result) > 1 else values


@composes(torch.unique_consecutive, Tensor.unique_consecutive, limits="no dim")
def unique_consecutive(
    func: Callable[..., Any],
    x: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """The first element of each run of equal ones, in the order of all elements."""
    if dim is not None:
        raise UnsupportedOperationError("distinct slices along a dim; leave dim out")
    flat = x.detach().flatten()
    begins = torch.cat([torch.ones_like(flat[:1], dtype=torch.bool), flat[1:] != flat[:-1]])
    result = [x.flatten()[begins]]
    if return_inverse:
        result.append((begins.cumsum(0) - 1).reshape(x.shape))
    if return_counts:
        (first,) = torch.nonzero(begins, as_tuple=True)
        end = torch.full_like(flat[:1], x.numel(), dtype=torch.long)
        result.append(torch.cat([first, end]).diff())
    return tuple(result) if len(result) > 1 else result[0]
