"""Counts of values: each rank counts its own, one all-reduce adds them up."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain import Subdomain
from lightning_shard.ops.extreme import extreme
from lightning_shard.ops.reduce import sum_over
from lightning_shard.ops.registry import UnsupportedOperationError, implements


@implements(torch.histc, Tensor.histc)
def histc(
    func: Callable[..., Tensor],
    x: Subdomain,
    bins: int = 100,
    min: float = 0,  # noqa: A002 - torch's names of the arguments
    max: float = 0,  # noqa: A002
) -> Tensor:
    """Counts in `bins` equal bins, on every rank; the range is that of all values if none given."""
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
    """Counts of the numbers 0, 1, ..., on every rank."""
    if weights is not None and not (isinstance(weights, Subdomain) and weights.layout == x.layout):
        raise UnsupportedOperationError("weights that are not split as the values are")
    own = weights.local if isinstance(weights, Subdomain) else None
    largest: Any = extreme(torch.amax, x) if x.shape[0] else -1
    counts = func(x.local, own, max(minlength, int(largest) + 1))
    return sum_over(x, counts, [0])
