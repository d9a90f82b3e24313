"""Reductions: the local part, one all-reduce over the axes that split the reduced dims.

What is reduced over every split dim comes back as a plain tensor, the same on every rank.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.comm import all_reduce, all_reduce_extreme
from lightning_shard.domain import Subdomain
from lightning_shard.layout import Factor
from lightning_shard.ops.align import common_layout, local_part, volume
from lightning_shard.ops.registry import UnsupportedOperationError, implements

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
    func: Callable[..., Tensor], x: Subdomain, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Subdomain | Tensor:
    dims = reduced_dims(x, dim)
    local = func(x.local, dims, keepdim, dtype=dtype) if dims else func(x.local, dtype=dtype)
    return result(x, sum_over(x, local, dims), dims, keepdim)


@implements(torch.mean, Tensor.mean)
def mean(
    func: Callable[..., Tensor], x: Subdomain, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
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


@implements(torch.amax, Tensor.amax, torch.amin, Tensor.amin)
def extreme(
    func: Callable[..., Tensor], x: Subdomain, dim: Dims = (), keepdim: bool = False
) -> Subdomain | Tensor:
    """The extreme; as torch does, ties share the gradient."""
    dims = reduced_dims(x, dim)
    axes = x.layout.axes(*dims)
    if not axes:
        return result(x, func(x.local, dims, keepdim), dims, keepdim)
    top = func.__name__ == "amax"
    x_ = x.local.detach()
    if any(x_.shape[d] == 0 for d in dims):  # this rank has no rows: the neutral element
        neutral = -torch.inf if top else torch.inf
        shape = [1 if d in dims else n for d, n in enumerate(x_.shape)]
        if not x_.is_floating_point():
            neutral = torch.iinfo(x_.dtype).min if top else torch.iinfo(x_.dtype).max
        best = x_.new_full(shape, neutral)
    else:
        best = func(x_, dims, True)
    op = dist.ReduceOp.MAX if top else dist.ReduceOp.MIN
    best = all_reduce_extreme(best, op, x.domain.group(axes))
    if x.local.is_floating_point():
        chosen = (x.local == best) | (x.local != x.local)
        ties = sum_over(x, chosen.sum(dims, keepdim=True).to(x.local.dtype), dims)
        picked = torch.where(chosen, x.local, torch.zeros_like(x.local))
        best = sum_over(x, picked.sum(dims, keepdim=True), dims) / ties
    return result(x, best if keepdim else _squeeze(best, dims), dims, keepdim)


@implements(torch.max, Tensor.max, torch.min, Tensor.min)
def max_(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """`max(x)` and `max(x, other)`; with a dim also the index, which must not be split."""
    name = func.__name__
    if not args and not kwargs:
        return extreme(getattr(torch, f"a{name}"), x)
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Subdomain | Tensor):
        layout = common_layout([x, other])
        owner = x if isinstance(x, Subdomain) else other
        return owner.like(func(local_part(x, layout), local_part(other, layout)), layout)
    dim = x.layout.dim(args[0] if args else kwargs["dim"])
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    if x.layout.axes(dim):
        raise UnsupportedOperationError(f"{name} with indices over the split dim {dim}")
    values, indices = func(x.local, dim, keepdim)
    return result(x, values, (dim,), keepdim), result(x, indices, (dim,), keepdim)


@implements(torch.all, Tensor.all, torch.any, Tensor.any)
def truth(
    func: Callable[..., Tensor], x: Subdomain, dim: Dims = None, keepdim: bool = False
) -> Subdomain | Tensor:
    """Count what decides: any true, or any false."""
    dims = reduced_dims(x, dim)
    marks = x.local.bool() if func.__name__ == "any" else x.local.logical_not()
    decided = sum_over(x, marks.sum(dims, keepdim=keepdim), dims) > 0
    return result(x, decided if func.__name__ == "any" else ~decided, dims, keepdim)


@implements(torch.norm, Tensor.norm, torch.linalg.vector_norm, torch.functional.norm)
def norm(
    func: Callable[..., Tensor],
    x: Subdomain,
    p: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: Any = None,
    **kwargs: Any,
) -> Subdomain | Tensor:
    """Vector norms of finite order above 0, and the two infinite ones."""
    p = kwargs.pop("ord", 2.0 if p in (None, "fro") else p)
    if kwargs or not isinstance(p, int | float) or p == 0:
        raise UnsupportedOperationError(f"norm of order {p!r} with {sorted(kwargs)}")
    size = x.like(x.local.to(dtype).abs() if dtype else x.local.abs())
    if p in (float("inf"), float("-inf")):
        return extreme(torch.amax if p > 0 else torch.amin, size, dim or (), keepdim)
    dims = reduced_dims(x, dim)
    total = sum_over(x, size.local.pow(p).sum(dims, keepdim=keepdim), dims)
    return result(x, total.pow(1 / p), dims, keepdim)


def _squeeze(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.reshape([n for d, n in enumerate(x.shape) if d not in dims])


def _elementwise_loss(func: Callable[..., Tensor]) -> Callable[..., Any]:
    """A loss that is a pointwise function with a reduction after it."""

    def loss(
        _: Callable[..., Tensor],
        input: Any,  # noqa: A002 - torch's name of the argument
        target: Any,
        *args: Any,
        reduction: str = "mean",
        size_average: bool | None = None,
        reduce: bool | None = None,
        **kwargs: Any,
    ) -> Subdomain | Tensor:
        if size_average is not None or reduce is not None:
            raise UnsupportedOperationError("the deprecated arguments size_average and reduce")
        weight = kwargs.pop("weight", None)
        operands = [input, target] if weight is None else [input, target, weight]
        layout = common_layout(operands)
        parts = [local_part(o, layout) for o in operands]
        owner = next(o for o in operands if isinstance(o, Subdomain))
        local = func(*parts[:2], *args, reduction="none", **kwargs)
        local = local if weight is None else local * parts[2]
        per_element = owner.like(local, layout)
        if reduction == "none":
            return per_element
        return (mean if reduction == "mean" else sum_)(getattr(torch, reduction), per_element)

    return functools.wraps(func)(loss)


for _loss in (F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy):
    implements(_loss)(_elementwise_loss(_loss))
