"""Finds which values there are, and how often: each rank counts its own and tells the others.

Counts in bins are added up by one all-reduce. Distinct values, of which no rank knows the number,
are put together on every rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import sum_over
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.uneven import exchange_rows, spans_of, told_to_all
from lightning_shard.ops.reduce.extreme import extreme
from lightning_shard.ops.registry import implements
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


@implements(torch.bincount, Tensor.bincount, limits="weights must be split as the values")
def bincount(
    func: Callable[..., Tensor],
    x: Subdomain,
    weights: Subdomain | Tensor | None = None,
    minlength: int = 0,
) -> Tensor:
    """Count the numbers 0, 1, ..., on every rank."""
    if weights is not None and not (isinstance(weights, Subdomain) and weights.layout == x.layout):
        raise UnsupportedOperationError("weights that are not split as the values are")
    own = weights.local if isinstance(weights, Subdomain) else None
    largest: Any = extreme(torch.amax, x) if x.shape[0] else -1
    counts = func(x.local, own, max(minlength, int(largest) + 1))
    return sum_over(x, counts, [0])


@implements(typed_torch.unique, Tensor.unique, limits="no inverse indices, no dim")
def unique(
    func: Callable[..., Any],
    x: Subdomain,
    sorted: bool = True,  # noqa: A002 - torch's names of the arguments
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Find the distinct values of all ranks, sorted, and how often each occurs: plain tensors."""
    if return_inverse or dim is not None:
        raise UnsupportedOperationError("inverse indices of distinct values, or those along a dim")
    own, numbers = typed_torch.unique(x.local, return_counts=True)
    group = x.domain.group(x.layout.axes())
    owned = spans_of(told_to_all(len(own), group))
    whole = [(0, owned[-1][1])] * len(owned)
    found = exchange_rows(own, 0, owned, whole, group)
    values, places = typed_torch.unique(found, return_inverse=True)
    if not return_counts:
        return values
    numbers = exchange_rows(numbers, 0, owned, whole, group)
    return values, torch.zeros_like(values, dtype=torch.long).index_add_(0, places, numbers)
