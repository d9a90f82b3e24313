"""Formulas of other functions, written for whole tensors."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.ops.autocast import cast_for, without_autocast
from lightning_shard.ops.registry import composes, listed, without_deprecated
from lightning_shard.processes.narrow import is_sequence
from lightning_shard.processes.torch_private.typed import linalg, typed_torch


@composes(torch.trapezoid, torch.trapz)
def trapezoid(
    func: Callable[..., Any], y: Any, x: Any = None, *, dx: float = 1, dim: int = -1
) -> Tensor:
    """Sum the areas of trapezoids under `y`; the sums of the ranks are added up."""
    if not y.shape[dim]:  # torch gives zeros of no samples, whatever `x` is
        return y.sum(dim, dtype=y.dtype).detach()
    if x is None:  # as torch, which adds up integers of few bits in int64
        return (y.sum(dim) - (y.select(dim, 0) + y.select(dim, -1)) * 0.5) * dx
    return _areas(y, x, dx, dim % y.ndim).sum(dim)


@composes(torch.cumulative_trapezoid)
def cumulative_trapezoid(
    func: Callable[..., Any], y: Any, x: Any = None, *, dx: float = 1, dim: int = -1
) -> Tensor:
    """Sum the areas of trapezoids up to each place; sums of earlier ranks travel."""
    return _areas(y, x, dx, dim % y.ndim).cumsum(dim)


def _areas(y: Any, x: Any, dx: float, d: int) -> Any:
    """Between each two points along dim `d`."""
    n = y.shape[d]
    pairs = max(n - 1, 0)
    areas = y.narrow(d, n - pairs, pairs) + y.narrow(d, 0, pairs)
    if x is None:
        return areas * (dx / 2)
    widths = x.diff(dim=-1 if x.ndim == 1 else d) / 2
    return areas * (widths.reshape([-1] + [1] * (y.ndim - 1 - d)) if x.ndim == 1 else widths)


@composes(torch.gradient)
def gradient(
    func: Callable[..., Any], x: Any, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1
) -> tuple[Tensor, ...]:
    """Take central differences, one-sided at the edges."""
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    spacing = 1 if spacing is None else spacing
    steps = list(spacing) if is_sequence(spacing) else [spacing] * len(dims)
    return tuple(_slope(x, d % x.ndim, h, edge_order) for d, h in zip(dims, steps, strict=True))


def _slope(x: Tensor, dim: int, step: Any, edge_order: int) -> Tensor:
    n = x.shape[dim]
    if n <= edge_order:
        raise RuntimeError(f"gradient needs more than {edge_order} rows of dim {dim}; got {n}")
    if isinstance(step, Tensor):
        return _slope_between(x, dim, step, edge_order)
    first = [x.narrow(dim, i, 1) for i in range(edge_order + 1)]
    last = [x.narrow(dim, n - 1 - i, 1) for i in range(edge_order + 1)]
    inner = (x.narrow(dim, 2, n - 2) - x.narrow(dim, 0, n - 2)) / (2 * step)
    return torch.cat([_one_sided(first) / step, inner, -_one_sided(last) / step], dim)


def _slope_between(x: Tensor, dim: int, places: Tensor, edge_order: int) -> Tensor:
    """The slope of parabolas through each three rows, which lie at any places."""
    widths = places.diff().reshape([-1] + [1] * (x.ndim - 1 - dim))
    rises = x.diff(dim=dim) / widths
    n = len(widths)
    a, b = widths[: n - 1], widths[1:]
    before, after = rises.narrow(dim, 0, n - 1), rises.narrow(dim, 1, n - 1)
    inner = (b * before + a * after) / (a + b)
    first, last = rises.narrow(dim, 0, 1), rises.narrow(dim, n - 1, 1)
    if edge_order == 2:
        first, last = 2 * first - inner.narrow(dim, 0, 1), 2 * last - inner.narrow(dim, n - 2, 1)
    return torch.cat([first, inner, last], dim)


def _one_sided(rows: Sequence[Tensor]) -> Tensor:
    """The difference quotient at the first of two or three rows."""
    if len(rows) == 2:
        return rows[1] - rows[0]
    return -1.5 * rows[0] + 2 * rows[1] - 0.5 * rows[2]


@composes(F.glu)
def glu(func: Callable[..., Any], x: Any, dim: int = -1) -> Tensor:
    """Multiply the first half of `dim` by the sigmoid of the second; rows of a split dim travel."""
    if x.shape[dim] % 2:
        raise RuntimeError(
            f"Halving dimension must be even, but dimension {dim} is size {x.shape[dim]}"
        )
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()


@composes(F.prelu, torch.prelu, Tensor.prelu)
def prelu(func: Callable[..., Any], x: Any, weight: Tensor) -> Tensor:
    """Use one slope, or one for each channel (dim 1)."""
    x, weight = cast_for(torch.prelu, x, weight)
    slope = (
        weight.reshape([-1] + [1] * max(x.ndim - 2, 0))
        if weight.numel() > 1
        else weight.reshape(())
    )
    # positive values take no part in the slope's gradient, which an infinity would make NaN
    return torch.where(x > 0, x, slope * torch.where(x > 0, 0, x))


@composes(F.bilinear, torch.bilinear)
def bilinear(
    func: Callable[..., Any], x: Any, input2: Any, weight: Any, bias: Any = None
) -> Tensor:
    """Contract two inputs with a weight; sums over split features travel."""
    operands = [x, weight, input2]
    with without_autocast(operands[0]):  # torch's autocast leaves it alone
        product = torch.einsum("...i,oij,...j->...o", *operands)
        return product if bias is None else product + bias


def _sum_of_products(a: Any, b: Any) -> Tensor:
    return torch.einsum("bij,bjk->ik", a, b)


_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm), torch.matmul),
    **dict.fromkeys((torch.addmv, Tensor.addmv), torch.mv),
    **dict.fromkeys((torch.addr, Tensor.addr), torch.outer),
    **dict.fromkeys((torch.addbmm, Tensor.addbmm), _sum_of_products),
}


@composes(*_PRODUCTS)
def add_product(
    func: Callable[..., Tensor],
    x: Any,
    *operands: Any,
    beta: float = 1,
    alpha: float = 1,
    **named: Any,
) -> Tensor:
    """`beta * x + alpha * (a @ b)`, in two steps; as in torch, `beta = 0` ignores `x`."""
    a, b = (*operands, *(named[name] for name in sorted(named)))
    x, a, b = cast_for(func, x, a, b)
    if _PRODUCTS[func] is torch.outer:  # the one that takes operands of several types
        a = a.to(torch.promote_types(a.dtype, x.dtype))
    product = _PRODUCTS[func](a, b)
    product = product if alpha == 1 else alpha * product
    if not beta:
        return product
    x = x if beta == 1 else beta * x
    # in memory the sum lies like its first operand, as torch's result does
    return x + product if _PRODUCTS[func] is torch.outer else product + x


@composes(linalg.multi_dot, torch.chain_matmul)
def multi_dot(func: Callable[..., Tensor], *matrices: Any) -> Tensor:
    """Multiply matrices one after the other, from the left."""
    given = matrices[0] if is_sequence(matrices[0]) else matrices
    return functools.reduce(torch.matmul, cast_for(torch.matmul, *given))


@composes(torch.kron, Tensor.kron)
def kron(func: Callable[..., Tensor], x: Any, other: Any) -> Tensor:
    """Give each element of `x` a block of the products with `other`; nothing travels."""
    ndim = max(x.ndim, other.ndim)
    a, b = (t[(None,) * (ndim - t.ndim)] for t in (x, other))
    blocks = a[(slice(None), None) * ndim] * b[(None, slice(None)) * ndim]
    return blocks.reshape([n * m for n, m in zip(a.shape, b.shape, strict=True)])


_IN_PLACE: dict[Any, Callable[..., Tensor]] = {
    Tensor.addmm_: Tensor.addmm, Tensor.addmv_: Tensor.addmv,
    Tensor.addr_: Tensor.addr, Tensor.baddbmm_: Tensor.baddbmm, Tensor.cumprod_: Tensor.cumprod,
    Tensor.cumsum_: Tensor.cumsum, Tensor.renorm_: Tensor.renorm, Tensor.tril_: Tensor.tril,
    Tensor.triu_: Tensor.triu,
}  # fmt: skip


@composes(*_IN_PLACE)
def in_place(func: Callable[..., Tensor], x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Write what the function returns into the tensor."""
    old = x.clone()  # a gradient may need it
    return x.copy_(_IN_PLACE[func](old, *args, **kwargs))


@composes(torch.vdot, Tensor.vdot)
def vdot(func: Callable[..., Tensor], x: Any, other: Any) -> Tensor:
    """Dot product with the conjugate of `x`; the sums of the ranks are added up."""
    return torch.dot(x.conj(), other)


@composes(linalg.vecdot)
def vecdot(func: Callable[..., Tensor], x: Any, y: Any, *, dim: int = -1) -> Tensor:
    """Dot products along `dim`; the sums of the ranks are added up if it is split."""
    x, y = cast_for(linalg.vecdot, x, y)
    return (x.conj() * y).sum(dim, dtype=x.dtype)


@composes(linalg.cross, torch.cross, Tensor.cross)
def cross(func: Callable[..., Tensor], x: Any, other: Any, dim: int | None = None) -> Tensor:
    """Take the cross product along a dim of three components."""
    x, y = typed_torch.broadcast_tensors(x, other)
    if dim is None:
        dim = -1 if func is linalg.cross or 3 not in x.shape else list(x.shape).index(3)
    if x.shape[dim] != 3:
        raise RuntimeError(f"cross: dim {dim} must have 3 rows, but has {x.shape[dim]}")
    return x.roll(-1, dim) * y.roll(1, dim) - x.roll(1, dim) * y.roll(-1, dim)


@composes(torch.cov, Tensor.cov, limits="no frequencies or weights of observations")
def cov(func: Callable[..., Tensor], x: Any, *, correction: int = 1, **weights: Any) -> Tensor:
    """Rows are variables, columns observations."""
    if any(w is not None for w in weights.values()):
        raise UnsupportedOperationError(f"cov with {sorted(weights)}")
    numbers = x.is_floating_point() or x.is_complex()
    rows = typed_torch.atleast_2d(x if numbers else x.to(torch.get_default_dtype()))
    centred = rows - rows.mean(1, keepdim=True)
    found = centred @ centred.mH / max(rows.shape[1] - correction, 0)
    return found.squeeze((0, 1)) if found.numel() == 1 else found


@composes(torch.corrcoef, Tensor.corrcoef)
def corrcoef(func: Callable[..., Tensor], x: Any) -> Tensor:
    """Rows are variables, columns observations; as in torch, rounding beyond 1 is cut off."""
    found: Any = cov(torch.cov, x)
    if found.ndim == 0:
        return found / found
    deviations = found.diagonal().real.sqrt()
    found = found / deviations[:, None] / deviations
    if not found.is_complex():
        return found.clamp(-1, 1)
    return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))


@composes(torch.renorm, Tensor.renorm)
def renorm(func: Callable[..., Tensor], x: Any, p: float, dim: int, maxnorm: float) -> Tensor:
    """Scale slices along `dim` to a norm of at most `maxnorm`; sums of powers travel."""
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    sizes = linalg.vector_norm(x, p, others, keepdim=True)
    scaled = x * torch.where(sizes > maxnorm, maxnorm / (sizes + 1e-7), 1.0)
    return scaled.contiguous()  # as torch's, also of a turned tensor


@composes(Tensor.sum_to_size)
def sum_to_size(func: Callable[..., Tensor], x: Any, *size: Any) -> Tensor:
    """Apply the adjoint of `expand`."""
    target = list(listed(size))
    added = x.ndim - len(target)
    x = x.sum(tuple(range(added))) if added else x
    ones = tuple(d for d, n in enumerate(target) if n == 1 != x.shape[d])
    return x.sum(ones, keepdim=True) if ones else x


@composes(torch.slice_scatter, Tensor.slice_scatter)
def slice_scatter(
    func: Callable[..., Tensor],
    x: Any,
    src: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """Copy of `x` with rows of a slice replaced; rows of `src` go to their owners."""
    return _with_rows(x, src, dim, slice(start, end, step))


@composes(torch.select_scatter, Tensor.select_scatter)
def select_scatter(func: Callable[..., Tensor], x: Any, src: Any, dim: int, index: int) -> Tensor:
    """Copy of `x` with one row replaced; it goes to its owner."""
    return _with_rows(x, src, dim, index)


def _with_rows(x: Any, src: Any, dim: int, entry: int | slice) -> Tensor:
    """A copy of `x` with `src` in a slice or a row of `dim`."""
    found = x.clone()
    found[(slice(None),) * (dim % found.ndim) + (entry,)] = src
    return found


@composes(torch.constant_pad_nd)
def constant_pad(
    func: Callable[..., Tensor], x: Any, pad: Sequence[int], value: float = 0
) -> Tensor:
    """Pad by a constant, as `F.pad` does; rows go to the owners of the longer dim."""
    return F.pad(x, list(pad), value=value)


@composes(torch.dist, Tensor.dist)
def dist(func: Callable[..., Any], x: Any, other: Any, p: float = 2) -> Tensor:
    """Norm of the difference; sums of powers travel."""
    x, other = cast_for(torch.dist, x, other)
    return linalg.vector_norm(x - other, p)


@composes(F.cosine_embedding_loss)
def cosine_embedding_loss(
    func: Callable[..., Any],
    x: Any,
    y: Any,
    target: Any,
    margin: float = 0,
    reduction: str = "mean",
    **deprecated: Any,
) -> Tensor:
    """Add 1e-12 to the squared lengths, as torch does."""
    without_deprecated(deprecated)
    x, y, target = cast_for(F.cosine_embedding_loss, x, y, target)
    squares = [(t * t).sum(-1) + 1e-12 for t in (x, y)]
    cosine = (x * y).sum(-1) / (squares[0] * squares[1]).sqrt()
    apart = torch.where(target == -1, (cosine - margin).clamp(min=0), 0.0)
    return _reduced(torch.where(target == 1, 1 - cosine, apart), reduction)


@composes(F.triplet_margin_loss)
def triplet_margin_loss(
    func: Callable[..., Any],
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
    **deprecated: Any,
) -> Tensor:
    """Triplet loss by pairwise distances; sums along split dims travel."""
    without_deprecated(deprecated)
    anchor, positive, negative = cast_for(F.triplet_margin_loss, anchor, positive, negative)
    far = F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    near = F.pairwise_distance(anchor, positive, p, eps)
    return _reduced((margin + near - far).clamp(min=0), reduction)


def _reduced(x: Tensor, reduction: str) -> Tensor:
    return x if reduction == "none" else x.mean() if reduction == "mean" else x.sum()
