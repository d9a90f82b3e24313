"""Medians and quantiles of one long split row: the ranks put it in order, and pick single elements.

The order itself has no gradient. What is picked has: it is read from the row, at its place there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import gathered, one_factor, sum_over
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import cast_for, of_one, uncast
from lightning_shard.ops.reduce.sort_rows import sorted_rows
from lightning_shard.ops.view.index import take_rows

_PAIRS: dict[str, Any] = {
    "median": torch.return_types.median,
    "nanmedian": torch.return_types.nanmedian,
    "kthvalue": torch.return_types.kthvalue,
}


def row_of_all(x: Subdomain) -> Subdomain:
    """Return all elements in their order, as one dim of one factor."""
    factors = tuple(f for dim in x.layout.dims for f in dim)
    return one_factor(x.like(x.local.reshape(-1), Layout((factors,), x.layout.grid)), 0)


@uncast
def kth_of_row(
    func: Callable[..., Any], x: Subdomain, dim: int | None, keepdim: bool, k: int | None
) -> Any:
    """Find the k-th smallest element of a row, or its median, and its place; plain tensors.

    Without `dim` equal elements share the gradient, as in torch.
    """
    row = row_of_all(x)
    count = row.shape[0]
    ignores_nan = func.__name__ == "nanmedian"
    if k is None:
        known = count - _nans(row)
        middle = (known - 1).clamp(min=0) // 2
        rank = middle if ignores_nan else torch.where(known < count, known, middle)
    else:
        rank = torch.tensor(k - 1, device="cpu")
    value, place = _picked(row, rank.reshape(1))
    if dim is None:
        return _shared(row, value.detach())
    shape = [1] * (x.ndim - (not keepdim))
    return _PAIRS[func.__name__]((value.reshape(shape), place.reshape(shape)))


def quantile_of_row(
    func: Callable[..., Tensor], x: Subdomain, q: Any, dims: int = 0, interpolation: str = "linear"
) -> Tensor:
    """Quantiles of all elements; NaN among them makes all quantiles NaN, or is left out.

    After the dims of `q` the result has some `dims` of extent 1.
    """
    (x,) = cast_for(of_one(func, 0.5), x)
    row = row_of_all(x)
    func(x.local.detach().new_zeros(min(row.shape[0], 1)), q, interpolation=interpolation)
    q = torch.as_tensor(q, dtype=x.dtype, device=x.local.device)
    last, nans = row.shape[0] - 1, _nans(row)
    if func.__name__ == "nanquantile":
        ranks = q * (last - nans).clamp(min=0)
    else:
        ranks = torch.where(nans > 0, last, q * last)
    if interpolation in ("lower", "higher", "nearest"):
        rounded = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}
        ranks = rounded[interpolation](ranks)
    below = ranks.detach().long()
    found, _ = _picked(row, below.reshape(-1))
    found = found.reshape(q.shape)
    if interpolation in ("linear", "midpoint"):
        above, _ = _picked(row, ranks.detach().ceil().long().reshape(-1))
        weights = ranks - below if interpolation == "linear" else torch.full_like(ranks, 0.5)
        found = found.lerp(above.reshape(q.shape), weights)
    return found.reshape([*q.shape, *[1] * dims])


def _nans(row: Subdomain) -> Tensor:
    """Count the elements of all ranks that are NaN."""
    return sum_over(row, row.local.isnan().sum(), [0])


def _picked(row: Subdomain, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """The elements at these places of the order, and where they are in the row."""
    places = gathered(take_rows(_order(row), 0, ranks))
    return gathered(take_rows(row, 0, places)), places


def _order(row: Subdomain) -> Subdomain:
    """Global places of the elements in ascending order, of which each rank has its part."""
    if row.layout.axes(0):
        return sorted_rows(row.like(row.local.detach()), descending=False)[1]
    return row.like(row.local.detach().argsort(stable=True))


def _shared(row: Subdomain, value: Tensor) -> Tensor:
    """The value, whose gradient all elements that equal it share."""
    if not row.local.is_floating_point():
        return value.reshape(())
    chosen = (row.local == value) | (row.local.isnan() & value.isnan())
    ties = sum_over(row, chosen.sum().to(row.dtype), [0])
    picked = torch.where(chosen, row.local, torch.zeros_like(row.local))
    return sum_over(row, picked.sum(), [0]) / ties
