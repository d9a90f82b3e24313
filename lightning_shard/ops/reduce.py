"""Reductions: the local part, one all-reduce over the axes that split the reduced dims.

What is reduced over every split dim comes back as a plain tensor, the same on every rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.comm import all_reduce
from lightning_shard.domain import Subdomain
from lightning_shard.halo import fetch_all
from lightning_shard.layout import Factor, Layout
from lightning_shard.ops.align import common_layout, local_part, volume
from lightning_shard.ops.registry import implements

Dims = int | Sequence[int] | None


def reduced_dims(x: Subdomain, dim: Dims) -> tuple[int, ...]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    return tuple(x.layout.dim(d) for d in ((dim,) if isinstance(dim, int) else dim))


def result(x: Subdomain, local: Tensor, dims: Sequence[int], keepdim: bool) -> Subdomain | Tensor:
    """Wrap a tensor from which `dims` were reduced on all ranks."""
    kept = [
        (Factor(1),) if d in dims else factors
        for d, factors in enumerate(x.layout.dims)
        if keepdim or d not in dims
    ]
    layout = type(x.layout)(tuple(kept), x.layout.grid)
    return x.like(local, layout) if layout.split_dims else local


def sum_over(x: Subdomain, local: Tensor, dims: Sequence[int]) -> Tensor:
    """Add up partial sums over the ranks that split `dims` of `x`."""
    axes = x.layout.axes(*dims) if dims else ()
    if not axes:
        return local
    wide = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    return all_reduce(wide, x.domain.group(axes)).to(local.dtype)


@implements(torch.sum, Tensor.sum, torch.nansum, Tensor.nansum)
def sum_(
    func: Callable[..., Tensor],
    x: Subdomain,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Subdomain | Tensor:
    dims = reduced_dims(x, dim)
    local = func(x.local, dims, keepdim, dtype=dtype) if dims else func(x.local, dtype=dtype)
    return result(x, sum_over(x, local, dims), dims, keepdim)


@implements(torch.mean, Tensor.mean)
def mean(
    func: Callable[..., Tensor],
    x: Subdomain,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Subdomain | Tensor:
    dims = reduced_dims(x, dim)
    local = torch.sum(x.local, dims, keepdim, dtype=dtype) if dims else func(x.local, dtype=dtype)
    return result(x, sum_over(x, local, dims) / volume(x.layout, dims), dims, keepdim)


@implements(torch.var, Tensor.var, torch.std, Tensor.std)
def var(
    func: Callable[..., Tensor],
    x: Subdomain,
    dim: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Subdomain | Tensor:
    """Two passes: the global mean, then the squared distances from it."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = reduced_dims(x, dim)
    correction = float(unbiased) if correction is None else correction
    count = volume(x.layout, dims)
    center = sum_over(x, x.local.sum(dims, keepdim=True), dims) / count
    squares = sum_over(x, (x.local - center).abs().square().sum(dims, keepdim=keepdim), dims)
    value = squares / max(count - correction, 0)
    return result(x, value.sqrt() if func.__name__ == "std" else value, dims, keepdim)


@implements(torch.std_mean, torch.var_mean)
def var_mean(func: Callable[..., Any], x: Subdomain, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    spread = torch.std if func.__name__ == "std_mean" else torch.var
    dim = args[0] if args and not isinstance(args[0], bool) else kwargs.get("dim")
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    return var(spread, x, *args, **kwargs), mean(torch.mean, x, dim, keepdim)


@implements(torch.nanmean, Tensor.nanmean)
def nanmean(
    func: Callable[..., Tensor],
    x: Subdomain,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Subdomain | Tensor:
    dims = reduced_dims(x, dim)
    total = sum_over(x, torch.nansum(x.local, dims, keepdim, dtype=dtype), dims)
    return result(
        x, total / sum_over(x, (~x.local.isnan()).sum(dims, keepdim), dims), dims, keepdim
    )


@implements(torch.count_nonzero, Tensor.count_nonzero)
def count_nonzero(
    func: Callable[..., Tensor], x: Subdomain, dim: Dims = None
) -> Subdomain | Tensor:
    dims = reduced_dims(x, dim)
    return result(x, sum_over(x, (x.local != 0).sum(dims), dims), dims, False)


@implements(torch.prod, Tensor.prod)
def prod(
    func: Callable[..., Tensor],
    x: Subdomain,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Subdomain | Tensor:
    """The product of all ranks' products, so that a zero on one of them has its gradient."""
    if dim is None:
        return torch.prod(one_of_all(x, x.layout.axes(), x.local.prod(dtype=dtype)), 0)
    d = x.layout.dim(dim)
    local = x.local.prod(d, keepdim, dtype=dtype)
    if x.layout.axes(d):
        local = torch.prod(one_of_all(x, x.layout.axes(d), local), 0)
    return result(x, local, (d,), keepdim)


@implements(torch.all, Tensor.all, torch.any, Tensor.any)
def truth(
    func: Callable[..., Tensor], x: Subdomain, dim: Dims = None, keepdim: bool = False
) -> Subdomain | Tensor:
    """Count what decides: any true, or any false."""
    dims = reduced_dims(x, dim)
    marks = x.local.bool() if func.__name__ == "any" else x.local.logical_not()
    decided = sum_over(x, marks.sum(dims, keepdim=keepdim), dims) > 0
    return result(x, decided if func.__name__ == "any" else ~decided, dims, keepdim)


@implements(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose)
def same(func: Callable[..., bool], x: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
    """One answer for all ranks."""
    if func.__name__ == "equal" and tuple(x.shape) != tuple(other.shape):
        return False
    layout = common_layout([x, other])
    owner = x if isinstance(x, Subdomain) else other
    agrees = func(local_part(x, layout), local_part(other, layout), *args, **kwargs)
    wrong = torch.tensor(float(not agrees), device=owner.local.device)
    return not sum_over(owner.like(owner.local, layout), wrong, range(layout.ndim)).item()


def one_of_all(x: Subdomain, axes: tuple[int, ...], part: Tensor) -> Tensor:
    """The `part`s of all ranks along `axes` (alike in shape), stacked in order, on every rank."""
    if not axes:
        return part.unsqueeze(0)
    grid = x.layout.grid
    layout = Layout.of((grid.parts(axes), *part.shape), {0: axes}, grid)
    return fetch_all(x.like(part.unsqueeze(0), layout), 0)


def squeezed(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.reshape([n for d, n in enumerate(x.shape) if d not in dims])
