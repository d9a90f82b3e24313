"""Finds extremes, and where they are: each rank has a candidate, and the best one wins.

Ranks hold rows in ascending order and a rank without rows comes last, so the first of equal
candidates is the first of equal rows, as in torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.domain.align import (
    all_gather_small,
    one_factor,
    sum_over,
)
from lightning_shard.domain.comm import all_reduce_extreme
from lightning_shard.domain.empty_ranks import concatenated
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.half import wide_dtype
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import uncast
from lightning_shard.ops.elementwise.pointwise import pointwise
from lightning_shard.ops.reduce.scan import one_of_each
from lightning_shard.ops.reduce.sums import Dims, reduced_dims, result, squeezed
from lightning_shard.ops.registry import implements


@dataclass(frozen=True)
class _Extreme:
    """The functions that find the largest, or the smallest."""

    of_dims: Callable[..., Tensor]
    along: Callable[..., Any]
    over_ranks: dist.ReduceOp.RedOpType
    is_largest: bool


_LARGEST = _Extreme(torch.amax, torch.max, dist.ReduceOp.MAX, is_largest=True)
_SMALLEST = _Extreme(torch.amin, torch.min, dist.ReduceOp.MIN, is_largest=False)
_KINDS: dict[Callable[..., Any], _Extreme] = {
    torch.amax: _LARGEST, Tensor.amax: _LARGEST, torch.amin: _SMALLEST, Tensor.amin: _SMALLEST,
}  # fmt: skip
_PICKS: dict[Callable[..., Any], _Extreme] = {
    torch.max: _LARGEST, Tensor.max: _LARGEST, torch.min: _SMALLEST, Tensor.min: _SMALLEST,
}  # fmt: skip
_PLACES: dict[Callable[..., Any], _Extreme] = {
    torch.argmax: _LARGEST, Tensor.argmax: _LARGEST,
    torch.argmin: _SMALLEST, Tensor.argmin: _SMALLEST,
}  # fmt: skip
_PAIRS: dict[Callable[..., Any], Any] = {
    torch.max: torch.return_types.max,
    torch.min: torch.return_types.min,
}


@implements(*_KINDS)
@uncast
def extreme(
    func: Callable[..., Tensor],
    x: Subdomain,
    dim: Dims = (),
    keepdim: bool = False,
    *,
    of_nan: bool = False,
) -> Subdomain | Tensor:
    """Find the extreme; ties share the gradient, as in torch.

    If it is NaN, its gradient is that of those elements that are, with `of_nan`. Without, all
    elements have the gradient NaN.
    """
    dims = reduced_dims(x, dim)
    axes = x.layout.axes(*dims) if dims else ()
    if not axes:
        return result(x, func(x.local, dims, keepdim), dims, keepdim)
    kind = _KINDS[func]
    rows = x.local.detach()
    if any(rows.shape[d] == 0 for d in dims):
        best = rows.new_full(
            [1 if d in dims else n for d, n in enumerate(rows.shape)], _worst(rows, kind.is_largest)
        )
    else:
        best = func(rows, dims, True)
    wide = best if best.is_floating_point() else best.long()  # backends lack bool and int16
    best = all_reduce_extreme(wide, kind.over_ranks, x.domain.group(axes)).to(best.dtype)
    has_graph = torch.is_grad_enabled() and x.local.requires_grad
    if x.local.is_floating_point() and (has_graph or in_forward_mode()):
        chosen = (x.local == best) | (x.local != x.local) if of_nan else x.local == best
        counts = chosen.sum(dims, keepdim=True).to(wide_dtype(x.local.dtype))
        ties = sum_over(x, counts, dims)
        if not of_nan:
            none = ties == 0
            chosen, ties = chosen | none, ties.masked_fill(none, math.nan)
        shares = torch.where(chosen, x.local, torch.zeros_like(x.local)) / ties
        mean = sum_over(x, shares.sum(dims, keepdim=True), dims)
        # the mean of equal values may be rounded, and `x == x.max()` must find them
        best = (mean + (best - mean).detach().nan_to_num(0.0, 0.0, 0.0)).to(best.dtype)
    return result(x, best if keepdim else squeezed(best, dims), dims, keepdim)


@implements(*_PICKS)
@uncast
def max_(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """`max(x)`, `max(x, other)`, and `max(x, dim)` with the indices."""
    kind = _PICKS[func]
    if not args and not kwargs:
        if 0 in x.shape:
            return func(x.local.new_empty(0))  # torch refuses it
        return extreme(kind.of_dims, x, of_nan=True)
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Subdomain | Tensor):
        return pointwise(torch.maximum if kind.along is torch.max else torch.minimum, x, other)
    dim = x.layout.dim(args[0] if args else kwargs["dim"])
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    values, indices = _best_along(kind.along, x, dim)
    if not keepdim:
        values, indices = values.squeeze(dim), indices.squeeze(dim)
    chosen = result(x, values, (dim,), keepdim), result(x, indices, (dim,), keepdim)
    return _PAIRS[kind.along](chosen)


@implements(*_PLACES)
@uncast
def argmax(
    func: Callable[..., Tensor], x: Subdomain, dim: int | None = None, keepdim: bool = False
) -> Subdomain | Tensor:
    """Place of the extreme; each rank's candidate and its global place travel."""
    pick = _PLACES[func].along
    x = x.like(x.local.detach())
    if dim is None:
        index = _best_of_all(pick, x)
        return index.reshape([1] * x.ndim) if keepdim else index
    d = x.layout.dim(dim)
    _, indices = _best_along(pick, x, d)
    return result(x, indices if keepdim else indices.squeeze(d), (d,), keepdim)


@implements(torch.aminmax, Tensor.aminmax)
def aminmax(
    func: Callable[..., Any], x: Subdomain, *, dim: int | None = None, keepdim: bool = False
) -> Any:
    """Smallest and largest values; one candidate of each rank travels for each."""
    dims = () if dim is None else dim
    both: Any = (extreme(torch.amin, x, dims, keepdim), extreme(torch.amax, x, dims, keepdim))
    return torch.return_types.aminmax(both)


def _best_along(pick: Callable[..., Any], x: Subdomain, dim: int) -> tuple[Tensor, Tensor]:
    """The extreme rows of `dim`, kept with extent 1, and their global indices."""
    if not x.layout.axes(dim):
        return pick(x.local, dim, True)
    x = one_factor(x, dim)
    rows = x.local
    if rows.shape[dim] == 0:
        shape = [*rows.shape[:dim], 1, *rows.shape[dim + 1 :]]
        rows = concatenated([rows, rows.new_full(shape, _worst(rows, pick is torch.max))], dim)
    values, indices = pick(rows, dim, True)
    low, _ = x.layout.dims[dim][0].bounds(x.layout.grid)
    values, rank = pick(one_of_each(x, dim, values), dim, True)
    return values, one_of_each(x, dim, indices + low).gather(dim, rank)


def _best_of_all(pick: Callable[..., Any], x: Subdomain) -> Tensor:
    """The flat global index of the first extreme element; local order is global order."""
    flat = x.local.reshape(-1)
    value, index = (
        flat.new_full((), _worst(flat, pick is torch.max)),
        flat.new_zeros((), dtype=torch.long),
    )
    if flat.numel():
        value, index = pick(flat, 0)
    values = all_gather_small(x, x.layout.axes(), value)
    indices = all_gather_small(x, x.layout.axes(), _global_index(x, index))
    best = pick(values, 0).values
    chosen = (values == best) | (values.isnan() & best.isnan())
    owned = all_gather_small(x, x.layout.axes(), torch.tensor(flat.numel() > 0, device=flat.device))
    last = math.prod(x.shape)
    return torch.where(chosen & owned, indices, last).min()


def _global_index(x: Subdomain, index: Tensor) -> Tensor:
    """The flat global index of the element at flat local `index`."""
    factors = [f for dim in x.layout.dims for f in dim]
    total, stride = torch.zeros_like(index), 1
    for factor in reversed(factors):
        low, high = factor.bounds(x.layout.grid)
        size = max(high - low, 1)
        total = total + (index % size + low) * stride
        index, stride = index // size, stride * factor.extent
    return total


def _worst(x: Tensor, top: bool) -> float | int | bool:
    """The identity of max (`top`) or min: the smallest or largest value of the dtype."""
    if x.dtype == torch.bool:
        return not top
    if x.is_floating_point():
        return -math.inf if top else math.inf
    limits = torch.iinfo(x.dtype)
    return limits.min if top else limits.max
