"""Extremes, and where they are: each rank's candidate, then the best of the candidates.

Ranks hold rows in ascending order and a rank without rows comes last, so the first of equal
candidates is the first of equal rows, as in torch.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.comm import all_reduce_extreme
from lightning_shard.domain import Subdomain
from lightning_shard.halo import concatenated
from lightning_shard.ops.align import common_layout, local_part, simple
from lightning_shard.ops.reduce import Dims, one_of_all, reduced_dims, result, squeezed, sum_over
from lightning_shard.ops.registry import implements
from lightning_shard.ops.scan import one_of_each


@implements(torch.amax, Tensor.amax, torch.amin, Tensor.amin)
def extreme(
    func: Callable[..., Tensor], x: Subdomain, dim: Dims = (), keepdim: bool = False
) -> Subdomain | Tensor:
    """The extreme; as torch does, ties share the gradient."""
    dims = reduced_dims(x, dim)
    axes = x.layout.axes(*dims) if dims else ()
    if not axes:
        return result(x, func(x.local, dims, keepdim), dims, keepdim)
    top = func.__name__ == "amax"
    rows = x.local.detach()
    if any(rows.shape[d] == 0 for d in dims):
        best = rows.new_full(
            [1 if d in dims else n for d, n in enumerate(rows.shape)], _worst(rows, top)
        )
    else:
        best = func(rows, dims, True)
    op = dist.ReduceOp.MAX if top else dist.ReduceOp.MIN
    wide = best if best.is_floating_point() else best.long()  # backends lack bool and int16
    best = all_reduce_extreme(wide, op, x.domain.group(axes)).to(best.dtype)
    if x.local.is_floating_point():
        chosen = (x.local == best) | (x.local != x.local)
        ties = sum_over(x, chosen.sum(dims, keepdim=True).to(x.local.dtype), dims)
        picked = torch.where(chosen, x.local, torch.zeros_like(x.local))
        best = sum_over(x, picked.sum(dims, keepdim=True), dims) / ties
    return result(x, best if keepdim else squeezed(best, dims), dims, keepdim)


@implements(torch.max, Tensor.max, torch.min, Tensor.min)
def max_(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """`max(x)`, `max(x, other)`, and `max(x, dim)` with the indices."""
    name = func.__name__
    if not args and not kwargs:
        return extreme(getattr(torch, f"a{name}"), x)
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Subdomain | Tensor):
        layout = common_layout([x, other])
        owner = next(o for o in (x, other) if isinstance(o, Subdomain))
        return owner.like(func(local_part(x, layout), local_part(other, layout)), layout)
    dim = x.layout.dim(args[0] if args else kwargs["dim"])
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    values, indices = _best_along(getattr(torch, name), x, dim)
    if not keepdim:
        values, indices = values.squeeze(dim), indices.squeeze(dim)
    chosen = result(x, values, (dim,), keepdim), result(x, indices, (dim,), keepdim)
    return getattr(torch.return_types, name)(chosen)


@implements(torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin)
def argmax(
    func: Callable[..., Tensor], x: Subdomain, dim: int | None = None, keepdim: bool = False
) -> Subdomain | Tensor:
    pick = torch.max if func.__name__ == "argmax" else torch.min
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
    dims = () if dim is None else dim
    both: Any = (extreme(torch.amin, x, dims, keepdim), extreme(torch.amax, x, dims, keepdim))
    return torch.return_types.aminmax(both)


def _best_along(pick: Callable[..., Any], x: Subdomain, dim: int) -> tuple[Tensor, Tensor]:
    """The extreme rows of `dim`, kept with extent 1, and their global indices."""
    if not x.layout.axes(dim):
        return pick(x.local, dim, True)
    x = simple(x, dim)
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
    values = one_of_all(x, x.layout.axes(), value)
    indices = one_of_all(x, x.layout.axes(), _global_index(x, index))
    best = pick(values, 0).values
    chosen = (values == best) | (values.isnan() & best.isnan())
    owned = one_of_all(x, x.layout.axes(), torch.tensor(flat.numel() > 0, device=flat.device))
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
    """What no element of the dtype of `x` loses to."""
    if x.dtype == torch.bool:
        return not top
    if x.is_floating_point():
        return -math.inf if top else math.inf
    limits = torch.iinfo(x.dtype)
    return limits.min if top else limits.max
