"""Reductions: each rank reduces its part, then one all-reduce joins the ranks that split the dims.

What is reduced over every split dim comes back as a plain tensor, the same on every rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import (
    all_gather_small,
    common_layout,
    local_part,
    sum_over,
    volume,
)
from lightning_shard.domain.half import HALF, wide, wide_dtype
from lightning_shard.domain.layout import Factor
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import uncast
from lightning_shard.ops.registry import implements
from lightning_shard.processes.torch_private.internals import is_all_true

Dims = int | Sequence[int] | None


def reduced_dims(x: Subdomain, dim: Dims) -> tuple[int, ...]:
    """List the dims that a reduction names; all of them if it names none."""
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


def rounded(found: Subdomain | Tensor, kind: torch.dtype | None) -> Subdomain | Tensor:
    """Cast what was computed in float32, if `kind` is half precision."""
    if kind not in HALF:
        return found
    return found.like(found.local.to(kind)) if isinstance(found, Subdomain) else found.to(kind)


@implements(torch.sum, Tensor.sum, torch.nansum, Tensor.nansum, joins=True)
def sum_(
    func: Callable[..., Tensor],
    x: Subdomain,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Subdomain | Tensor:
    """Sum; the sums of the ranks that split the dims are added up."""
    dims = reduced_dims(x, dim)
    kind = None
    if x.dtype in HALF or dtype in HALF:
        kind = func(x.local.new_zeros(()), dtype=dtype).dtype  # as autocast has it
        dtype = wide_dtype(kind)
    local = func(x.local, dims, keepdim, dtype=dtype) if dims else func(x.local, dtype=dtype)
    return rounded(result(x, sum_over(x, local, dims), dims, keepdim), kind)


@implements(torch.mean, Tensor.mean, torch.nanmean, Tensor.nanmean, joins=True)
@uncast
def mean(
    func: Callable[..., Tensor],
    x: Subdomain,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Subdomain | Tensor:
    """Mean, of all elements or of those that are not NaN; sums of the ranks are added up."""
    dims = reduced_dims(x, dim)
    kind: torch.dtype = dtype or x.dtype
    dtype = wide_dtype(kind) if kind in HALF else dtype
    count: Tensor | int = volume(x.layout, dims)
    if func in (torch.nanmean, Tensor.nanmean):
        total = torch.nansum(x.local, dims, keepdim, dtype=dtype)
        count = sum_over(x, (~x.local.isnan()).sum(dims, keepdim), dims)
    elif dims:
        total = torch.sum(x.local, dims, keepdim, dtype=dtype)
    else:
        total = func(x.local, dtype=dtype)
    return rounded(result(x, sum_over(x, total, dims) / count, dims, keepdim), kind)


@implements(torch.var, Tensor.var, torch.std, Tensor.std, joins=True)
@uncast
def var(func: Callable[..., Tensor], x: Subdomain, *args: Any, **kwargs: Any) -> Subdomain | Tensor:
    """Variance or standard deviation; means and squared deviations of the ranks travel."""
    variance, _ = _var_and_mean(x, *args, **kwargs)
    return rounded(_spread(func, variance), x.dtype)


@implements(torch.var_mean, torch.std_mean, joins=True)
@uncast
def var_mean(func: Callable[..., Any], x: Subdomain, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Mean, and variance or standard deviation; means and squared deviations travel."""
    variance, center = _var_and_mean(x, *args, **kwargs)
    return rounded(_spread(func, variance), x.dtype), rounded(center, x.dtype)


def _spread(func: Callable[..., Any], variance: Subdomain | Tensor) -> Subdomain | Tensor:
    """The variance, or its root where `func` gives standard deviations."""
    if func not in (torch.std, Tensor.std, torch.std_mean):
        return variance
    if isinstance(variance, Subdomain):
        return variance.like(flat_at_zero(torch.sqrt, variance.local))
    return flat_at_zero(torch.sqrt, variance)


def flat_at_zero(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call a function with the value and the gradient zero at zero.

    Torch's standard deviation and norms have them; the gradient of a root is infinite there.
    """
    zero = x == 0
    return torch.where(zero, 0, function(torch.where(zero, 1, x)))


def _var_and_mean(
    x: Subdomain,
    dim: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Any, Any]:
    """Compute the global mean, and then the squared distances from it, in float32 at least.

    Where the mean is large its rounding shifts all distances; what they sum up to tells how far.
    """
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = reduced_dims(x, dim)
    correction = float(unbiased) if correction is None else correction
    count = volume(x.layout, dims)
    x = x.like(wide(x.local))
    center = sum_over(x, x.local.sum(dims, keepdim=True), dims) / count
    distances = x.local - center
    shifts = torch.view_as_real(distances).unbind(-1) if x.dtype.is_complex else (distances,)
    parts = [sum(shift.square() for shift in shifts), *shifts]
    totals = torch.stack([part.sum(dims, keepdim=keepdim) for part in parts])
    squares, *shifts = sum_over(x, totals, dims).unbind()
    for shift in shifts:
        squares = squares - shift.square() / count
    mean = center if keepdim else squeezed(center, dims)
    variance = torch.where(squares < 0, 0, squares) / max(count - correction, 0)
    return result(x, variance, dims, keepdim), result(x, mean, dims, keepdim)


@implements(torch.count_nonzero, Tensor.count_nonzero)
def count_nonzero(
    func: Callable[..., Tensor], x: Subdomain, dim: Dims = None
) -> Subdomain | Tensor:
    """Count the elements that are not zero; the counts of the ranks are added up."""
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
    kind = func(x.local.new_zeros(()), dtype=dtype).dtype  # as autocast has it
    dtype = wide_dtype(kind)
    if dim is None:
        parts = all_gather_small(x, x.layout.axes(), x.local.prod(dtype=dtype))
        return rounded(torch.prod(parts, 0, dtype=dtype), kind)
    d = x.layout.dim(dim)
    local = x.local.prod(d, keepdim, dtype=dtype)
    if x.layout.axes(d):
        local = torch.prod(all_gather_small(x, x.layout.axes(d), local), 0, dtype=dtype)
    return rounded(result(x, local, (d,), keepdim), kind)


@implements(torch.any, Tensor.any)
def any_(
    func: Callable[..., Tensor], x: Subdomain, dim: Dims = None, keepdim: bool = False
) -> Subdomain | Tensor:
    """Return True where any element is; counts of the ranks are added up."""
    dims = reduced_dims(x, dim)
    return result(x, _as_truth(x, _count(x, x.local.bool(), dims, keepdim) > 0), dims, keepdim)


@implements(torch.all, Tensor.all, is_all_true)
def all_(
    func: Callable[..., Tensor], x: Subdomain, dim: Dims = None, keepdim: bool = False
) -> Subdomain | Tensor:
    """Return True where all elements are; counts of the ranks are added up."""
    dims = reduced_dims(x, dim)
    wrong = _count(x, x.local.logical_not(), dims, keepdim)
    return result(x, _as_truth(x, wrong == 0), dims, keepdim)


def _as_truth(x: Subdomain, found: Tensor) -> Tensor:
    """In torch's dtype of what is true of `x`: bytes stay bytes."""
    return found.to(torch.uint8) if x.dtype == torch.uint8 else found


def _count(x: Subdomain, marks: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Count the true `marks` of all ranks along `dims`."""
    return sum_over(x, marks.sum(tuple(dims), keepdim=keepdim), dims)


@implements(torch.equal, Tensor.equal)
def equal(func: Callable[..., bool], x: Any, other: Any) -> bool:
    """Tensors of two shapes differ, also where one could be broadcast to the other."""
    return tuple(x.shape) == tuple(other.shape) and allclose(func, x, other)


@implements(torch.allclose, Tensor.allclose)
def allclose(func: Callable[..., bool], x: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
    """Give one answer for all ranks."""
    layout = common_layout([x, other])
    owner = x if isinstance(x, Subdomain) else other
    agrees = func(local_part(x, layout), local_part(other, layout), *args, **kwargs)
    wrong = torch.tensor(float(not agrees), device=owner.local.device)
    return not sum_over(owner.like(owner.local, layout), wrong, range(layout.ndim)).item()


def squeezed(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Remove `dims`, all of extent 1."""
    return x.reshape([n for d, n in enumerate(x.shape) if d not in dims])
