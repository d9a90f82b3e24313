"""Finds which values there are, and how often: each rank counts its own and tells the others.

Counts in bins are added up by one all-reduce. Distinct values are put together on every rank: where
they are asked for they are few, and programs loop over them. The first elements of runs of equal
ones, which may be many, stay split.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import (
    common_layout,
    local_part,
    split_moved,
    subdomains,
    sum_over,
)
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.local_group import gathered_objects
from lightning_shard.domain.masked_rows import chosen_by
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.uneven import exchange_rows, spans_of
from lightning_shard.ops.reduce.extreme import extreme
from lightning_shard.ops.registry import composes, implements
from lightning_shard.processes.torch_private.typed import typed_torch


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
    if own is not None and x.shape[0]:  # without numbers torch makes integers, whatever the weights
        counts = counts.to(torch.float32 if own.dtype == torch.float32 else torch.float64)
    return sum_over(numbers, counts, [0])


@implements(typed_torch.unique, Tensor.unique, limits="no slices (dim) that are split")
def unique(
    func: Callable[..., Any],
    x: Subdomain,
    sorted: bool = True,  # noqa: A002 - torch's names of the arguments
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Find the distinct values, or slices along `dim`, of all ranks, sorted: plain tensors.

    So is how often each occurs. The inverse is split as `x` is: the place of each among them.
    """
    x = x.like(x.local.detach())
    if dim is not None:
        x = _slices_of_ranks(x, x.layout.dim(dim))
    axes = x.layout.axes()
    along = x.layout.dim(dim) if dim is not None else 0
    own, places, numbers = _distinct(x, dim)
    group = x.domain.group(axes) if axes else None
    found, owned, offset = own, [(0, own.shape[along])], 0
    if group is not None:
        owned = spans_of(gathered_objects(own.shape[along], group))
        everything = [(0, owned[-1][1])] * len(owned)
        found = exchange_rows(own, along, owned, everything, group)
        numbers = exchange_rows(numbers, 0, owned, everything, group)
        offset = owned[x.layout.grid.index(axes)][0]
    values, merged = typed_torch.unique(found, return_inverse=True, dim=dim)
    result: list[Any] = [values]
    if return_inverse:
        inverse = merged[offset + places]
        layout = x.layout if dim is None else Layout((x.layout.dims[along],), x.layout.grid)
        inverse = x.like(inverse, layout)
        result.append(_numbered(x, inverse, values) if dim is None else inverse)
    if return_counts:
        counts = torch.zeros(values.shape[along], dtype=torch.long, device=values.device)
        result.append(counts.index_add_(0, merged, numbers))
    if return_inverse and not result[1].layout.split_dims:
        result[1] = result[1].local
    return tuple(result) if len(result) > 1 else values


def _distinct(x: Subdomain, dim: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's distinct values or slices, the place of each of its own, and how many are so."""
    if x.local.numel():
        found = typed_torch.unique(x.local, return_inverse=True, return_counts=True, dim=dim)
        return found[0], found[1], found[2]
    shape = (0,) if dim is None else x.local.shape
    places = x.local.new_zeros(x.local.shape if dim is None else (0,), dtype=torch.long)
    return x.local.reshape(shape), places, places.reshape(-1)


def _slices_of_ranks(x: Subdomain, dim: int) -> Subdomain:
    """`x` with no other dim split than `dim`: each rank has whole slices.

    Raises:
        UnsupportedOperationError: Two axes split it, of which one splits the slices; or there is
            NaN in them, so that they have no order.
    """
    if any(n == 0 for d, n in enumerate(x.shape) if d != dim):
        typed_torch.unique(x.local.new_zeros(x.shape), dim=dim)  # raises torch's own error
    others = [d for d in x.layout.split_dims if d != dim]
    if len(x.layout.split_dims) > 1:
        raise UnsupportedOperationError("distinct slices that are split themselves, and their dim")
    if others:
        x = split_moved(x, others[0], dim)
    nans = sum_over(x, x.local.isnan().sum(), range(x.ndim))
    if int(nans):
        raise UnsupportedOperationError("distinct slices with NaN, which has no place in an order")
    return x


def _numbered(x: Subdomain, inverse: Subdomain, values: Tensor) -> Subdomain:
    """Give each NaN, which is a value of its own, its place: in the order of all elements."""
    nans = values.isnan().sum()
    if not int(nans):
        return inverse
    chosen = chosen_by(x.like(x.local.isnan()))
    places = inverse.local.reshape(-1).clone()
    places[chosen.places] = len(values) - nans + chosen.numbers
    return inverse.like(places.reshape(inverse.local.shape))


@composes(torch.unique_consecutive, Tensor.unique_consecutive, limits="no slices (dim)")
def unique_consecutive(
    func: Callable[..., Any],
    x: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Find the first element of each run of equal ones, in the order of all elements."""
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
