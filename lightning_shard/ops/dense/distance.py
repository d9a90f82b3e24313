"""Norms and distances: powers are summed over all ranks, then the root is taken."""

import math
from collections.abc import Callable
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import common_layout, local_part, sum_over
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.half import wide
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import cast_for, uncast
from lightning_shard.ops.dense.linear import contract
from lightning_shard.ops.reduce.extreme import extreme
from lightning_shard.ops.reduce.sums import Dims, flat_at_zero, reduced_dims, result, rounded, sum_
from lightning_shard.ops.registry import implements
from lightning_shard.processes.torch_private.typed import linalg, typed_torch

Operand = Subdomain | Tensor


@implements(typed_torch.norm, Tensor.norm, linalg.vector_norm,
            limits="no negative finite order, no 'nuc'")  # fmt: skip
def norm(
    func: Callable[..., Tensor],
    x: Subdomain,
    p: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: Any = None,
    **kwargs: Any,
) -> Subdomain | Tensor:
    """Take a vector norm of any order but a negative finite one."""
    p = kwargs.pop("ord", 2.0 if p in (None, "fro") else p)
    if kwargs or not isinstance(p, int | float) or -math.inf < p < 0:
        raise UnsupportedOperationError(f"norm of order {p!r} with {sorted(kwargs)}")
    if dtype is None:
        (x,) = cast_for(func, x)
    return _norm(x, p, dim, keepdim, dtype)


@uncast
def _norm(
    x: Subdomain, p: float, dim: Dims, keepdim: bool, dtype: torch.dtype | None
) -> Subdomain | Tensor:
    dims = reduced_dims(x, dim)
    if not x.layout.axes(*dims):
        return result(x, linalg.vector_norm(x.local, p, dims, keepdim, dtype=dtype), dims, keepdim)
    if p == 0:
        kept = x.like((x.local != 0).to(dtype or x.local.abs().dtype))
        return sum_(torch.sum, kept, dims, keepdim)
    local = x.local.to(dtype) if dtype else x.local
    size = x.like(local.abs())
    if p in (float("inf"), float("-inf")):
        return extreme(torch.amax if p > 0 else torch.amin, size, dims, keepdim, of_nan=True)
    powers = _squares(wide(local)) if p == 2 else _power(wide(size.local), p)
    total = sum_over(x, powers.sum(dims, keepdim=keepdim), dims)
    return rounded(result(x, _root(total, p), dims, keepdim), size.dtype)


@implements(F.cosine_similarity, torch.cosine_similarity)
def cosine_similarity(
    func: Callable[..., Tensor], x1: Operand, x2: Operand, dim: int = 1, eps: float = 1e-8
) -> Operand:
    """Cosine along `dim`; sums of products and squares travel if it is split."""
    a, b = _aligned(x1, x2)
    dims = (a.layout.dim(dim),)
    sizes = [_local(norm(typed_torch.norm, x, 2, dims, True)).clamp_min(eps) for x in (a, b)]
    product = (a.local / sizes[0]) * (b.local / sizes[1])
    return result(a, sum_over(a, product.sum(dims), dims), dims, False)


@implements(torch.cdist, limits="no infinite order over split coordinates (last dim)")
def cdist(
    func: Callable[..., Tensor], x1: Operand, x2: Operand, p: float = 2.0, *_: Any, **__: Any
) -> Operand:
    """Compute distances of all pairs by differences: (*, P, M) and (*, R, M) -> (*, P, R)."""
    split = any(x.layout.axes(x.ndim - 1) for x in (x1, x2) if isinstance(x, Subdomain))
    if split and p == math.inf:
        raise UnsupportedOperationError("the largest difference of split coordinates")
    batch = ascii_letters[: max(x1.ndim, x2.ndim) - 2]
    labels = [(batch + rows)[-x.ndim :] for x, rows in ((x1, "XZ"), (x2, "YZ"))]

    def local(a: Tensor, b: Tensor) -> Tensor:
        size = torch.cdist(wide(a), wide(b), p, compute_mode="donot_use_mm_for_euclid_dist")
        return _power(size, p or 1) if split else size  # order 0 counts

    found = contract(local, [x1, x2], labels, batch + "XY")
    if split:
        whole = _root(_local(found), p or 1)
        found = found.like(whole) if isinstance(found, Subdomain) else whole
    return rounded(found, x1.dtype)


@implements(F.pairwise_distance, torch.pairwise_distance)
def pairwise_distance(
    func: Callable[..., Tensor],
    x1: Operand,
    x2: Operand,
    p: float = 2.0,
    eps: float = 1e-6,
    keepdim: bool = False,
) -> Operand:
    """Norm of differences along the last dim; sums of powers travel if it is split."""
    a, b = _aligned(x1, x2)
    return norm(typed_torch.norm, a.like(a.local - b.local + eps), p, -1, keepdim)


def _aligned(*operands: Operand) -> list[Subdomain]:
    """The operands in their common layout, expanded to its shape."""
    layout = common_layout(operands)
    owner = next(o for o in operands if isinstance(o, Subdomain))
    return [owner.like(local_part(o, layout).expand(layout.local_shape), layout) for o in operands]


def _local(x: Operand) -> Tensor:
    return x.local if isinstance(x, Subdomain) else x


def _squares(x: Tensor) -> Tensor:
    """Square the modulus of each value; that of `abs` has the second derivative 0 at 0."""
    return x.real.square() + x.imag.square() if x.is_complex() else x.square()


def _power(size: Tensor, p: float) -> Tensor:
    """`size ** p` with the gradient zero at zero, as torch's norms of low order have."""
    return size.pow(p) if p >= 1 else flat_at_zero(lambda x: x.pow(p), size)


def _root(total: Tensor, p: float) -> Tensor:
    """`total ** (1 / p)` with the gradient zero at zero, as torch's norms have."""
    return total if p == 1 else flat_at_zero(lambda x: x.pow(1 / p), total)
