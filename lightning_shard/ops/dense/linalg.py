"""Linear algebra takes small matrices, one for each place of a field: the last two dims are whole.

The places (batch dims) may be split; each rank works on its own.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import (
    broadcasting,
    common_layout,
    local_part,
    split_moved,
    subdomains,
)
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Dim, Factor, Layout
from lightning_shard.domain.memory_format import laid_by
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import cast_for
from lightning_shard.ops.registry import composes, implements
from lightning_shard.ops.view.index import getitem
from lightning_shard.ops.view.permute import movedim
from lightning_shard.ops.view.reshape import unsqueeze
from lightning_shard.processes.torch_private.typed import linalg

Operand = Subdomain | Tensor
LIMITS = "the matrix dims (the last two) must be whole"


@implements(linalg.inv, torch.inverse, Tensor.inverse, linalg.inv_ex, linalg.pinv, torch.pinverse,
            Tensor.pinverse, linalg.det, torch.det, Tensor.det, torch.logdet, Tensor.logdet,
            linalg.slogdet, torch.slogdet, Tensor.slogdet, linalg.cholesky, linalg.cholesky_ex,
            linalg.eigh, linalg.eigvalsh, linalg.eig, linalg.eigvals, linalg.svd, torch.svd,
            Tensor.svd, linalg.svdvals, linalg.qr, linalg.lu, linalg.lu_factor, linalg.matrix_exp,
            torch.matrix_exp, Tensor.matrix_exp, linalg.matrix_power, torch.matrix_power,
            Tensor.matrix_power, linalg.matrix_rank, linalg.cond,
            limits=f"{LIMITS}; no tolerance for each matrix")  # fmt: skip
def of_matrices(func: Callable[..., Any], x: Subdomain, *args: Any, **kwargs: Any) -> Any:
    """Compute functions of one matrix: numbers, vectors, matrices, or several of these."""
    _whole_matrices(x)
    if any(isinstance(t, Operand) and t.ndim for t in (*args, *kwargs.values())):
        raise UnsupportedOperationError("a tolerance for each matrix")
    places = x.layout.dims[:-2]
    found = func(x.local, *args, **kwargs)

    def own(value: Tensor) -> Subdomain:
        if not value.numel() and value.is_floating_point():
            value = empty_attached(value.shape, x.local, is_curved=True).to(value.dtype)
        added = tuple((Factor(n),) for n in value.shape[len(places) :])
        layout = Layout((*places, *added), x.layout.grid)
        # torch's matrices lie in columns or in rows, as its library gives them
        return (x.in_any_order if len(added) > 1 else x.like)(value, layout)

    return own(found) if isinstance(found, Tensor) else type(found)([own(f) for f in found])


@implements(linalg.solve, linalg.solve_triangular, torch.cholesky_solve, Tensor.cholesky_solve,
            limits="matrices must be whole; another dim of right sides is split in place of rows",
)  # fmt: skip
def solve(
    func: Callable[..., Tensor], a: Operand, b: Operand, *args: Any, **kwargs: Any
) -> Subdomain:
    """Solve systems of equations; right sides are matrices, or vectors for `linalg.solve`."""
    if func is linalg.solve and tuple(b.shape) == tuple(a.shape[:-1]):
        column = unsqueeze(func, b, -1) if isinstance(b, Subdomain) else b.unsqueeze(-1)
        x = solve(func, a, column, *args, **kwargs)
        return x.in_any_order(x.local.squeeze(-1), Layout(x.layout.dims[:-1], x.layout.grid))
    own = subdomains([a, b])[0]
    last = func in (linalg.solve, linalg.solve_triangular)  # the right sides come last
    matrix, sides = (a, b) if last else (b, a)
    spare = None
    if isinstance(sides, Subdomain) and kwargs.get("left", True):
        spare = _spare_dim(sides)
        sides = sides if spare is None else split_moved(sides, sides.ndim - 2, sides.ndim + spare)
    else:
        _whole_matrices(*subdomains([sides]))
    _whole_matrices(*subdomains([matrix]))
    pair = [matrix, sides] if last else [sides, matrix]
    layout = common_layout([broadcasting(t, {t.ndim - 2, t.ndim - 1}) for t in pair])
    columns = sides.layout.dims[-1] if isinstance(sides, Subdomain) else (Factor(sides.shape[-1]),)
    places = {a for dim in layout.dims[:-2] for f in dim for a in f.axes}
    if places & {a for f in columns for a in f.axes}:
        raise UnsupportedOperationError("columns that are split over the ranks that split matrices")

    def placed(*matrix_dims: Dim) -> Layout:
        return Layout((*layout.dims[:-2], *matrix_dims), layout.grid)

    order, rows = (Factor(matrix.shape[-1]),), (Factor(sides.shape[-2]),)
    wanted = {id(matrix): placed(order, order), id(sides): placed(rows, columns)}
    found = func(*[local_part(t, wanted[id(t)]) for t in pair], *args, **kwargs)
    solved = own.in_any_order(found, placed(rows, columns))  # torch solves column by column
    return solved if spare is None else split_moved(solved, solved.ndim + spare, solved.ndim - 2)


def _spare_dim(sides: Subdomain) -> int | None:
    """The dim, counted from the last, that is split in place of rows; None if these are whole."""
    if not sides.layout.axes(sides.ndim - 2):
        return None
    others = [d for d in range(-sides.ndim, 0) if d != -2]
    spare = [d for d in others if not sides.layout.axes(sides.ndim + d)]
    if not spare:
        raise UnsupportedOperationError("right sides of which rows and all other dims are split")
    return max(spare, key=lambda d: sides.shape[d])


def _whole_matrices(*operands: Subdomain) -> None:
    for x in operands:
        if x.layout.axes(x.ndim - 2, x.ndim - 1):
            raise UnsupportedOperationError("matrices of which a dim is split")


@implements(torch.diagonal, Tensor.diagonal, linalg.diagonal)
def diagonal(
    func: Callable[..., Any],
    x: Subdomain,
    offset: int = 0,
    dim1: int | None = None,
    dim2: int | None = None,
) -> Subdomain:
    """Diagonal of two dims: a view if both are whole, else a copy, whose rows travel."""
    first, second = (-2, -1) if func is linalg.diagonal else (0, 1)
    one = x.layout.dim(first if dim1 is None else dim1)
    two = x.layout.dim(second if dim2 is None else dim2)
    strides = x.strides_of("diagonal", offset, one, two)
    if one != two and x.layout.axes(one, two):
        matrices = movedim(func, x, (one, two), (0, 1))
        top, left = max(-offset, 0), max(offset, 0)
        length = min(matrices.shape[0] - top, matrices.shape[1] - left)
        row = torch.arange(max(length, 0), device=x.local.device)
        found = movedim(func, getitem(func, matrices, (row + top, row + left)), 0, -1)
        view = x.local.diagonal(0, one, two)
        local = laid_by(found.local, strides or view.stride())
        return x.copy(local, found.layout, strides)
    local = torch.diagonal(x.local, offset, one, two)
    kept = [factors for d, factors in enumerate(x.layout.dims) if d not in (one, two)]
    layout = Layout((*kept, (Factor(local.shape[-1]),)), x.layout.grid)
    return x.view(local, layout, strides)


@composes(torch.diag_embed, Tensor.diag_embed)
def diag_embed(
    func: Callable[..., Tensor], x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> Tensor:
    """Make matrices with the last dim on a diagonal; rows move to its place."""
    size = x.shape[-1] + abs(offset)
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    found = _on_diagonal(zero, (size, size), x, offset).movedim((-2, -1), (dim1, dim2))
    return found.contiguous()  # as torch's, also of a turned tensor


@composes(torch.diagonal_scatter, Tensor.diagonal_scatter)
def diagonal_scatter(
    func: Callable[..., Tensor], x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    """Copy a tensor with other values on a diagonal; these travel to their rows."""
    matrices = x.movedim((dim1, dim2), (-2, -1))
    found = _on_diagonal(matrices, matrices.shape[-2:], src, offset)
    return x.clone().copy_(found.movedim((-2, -1), (dim1, dim2)))  # in memory it lies like `x`


@composes(Tensor.fill_diagonal_, limits="matrices alone")
def fill_diagonal_(func: Callable[..., Tensor], x: Any, fill_value: Any, wrap: bool = False) -> Any:
    """Write a number onto the diagonal of a matrix; nothing travels.

    With `wrap` the diagonal of a tall matrix begins again below a row that it leaves out.
    """
    if x.ndim > 2:
        raise UnsupportedOperationError(f"a diagonal of {x.ndim} dims, where it serves 2")
    rows, columns = x.shape
    for start in range(0, rows, columns + 1) if wrap else (0,):
        chosen = torch.ones_like(x, dtype=torch.bool).tril(-start).triu(-start)
        x.masked_fill_(chosen, fill_value)
    return x


@composes(torch.diag, Tensor.diag, torch.diagflat, Tensor.diagflat)
def diag(func: Callable[..., Tensor], x: Any, diagonal: int = 0, **named: int) -> Tensor:
    """Make a matrix of a vector, whose values travel to their rows; or take a matrix's diagonal."""
    offset = named.get("offset", diagonal)
    if func in (torch.diagflat, Tensor.diagflat):
        x = x.flatten()
    if x.ndim == 1:
        return x.diag_embed(offset)
    return x.diagonal(offset).clone(memory_format=torch.contiguous_format)  # torch copies, too


@composes(torch.block_diag)
def block_diag(func: Callable[..., Tensor], *tensors: Any) -> Tensor:
    """Put matrices one below the other, each right of the one before; rows move to their place."""
    blocks = [t if t.ndim == 2 else t.reshape(1, -1) for t in tensors]
    total, left, rows = sum(b.shape[1] for b in blocks), 0, list[Tensor]()
    for block in blocks:
        rows.append(F.pad(block, (left, total - left - block.shape[1])))
        left += block.shape[1]
    return torch.cat(rows)


def _on_diagonal(others: Any, shape: Sequence[int], values: Any, offset: int) -> Tensor:
    """Return matrices of a shape (R, C) with `values` (..., K) on a diagonal, else `others`."""
    above, (rows, columns) = max(-offset, 0), shape
    padded = F.pad(values, (above, rows - above - values.shape[-1]))
    row = torch.arange(rows, device=values.device).unsqueeze(-1)
    chosen = torch.arange(columns, device=values.device) - row == offset
    return torch.where(chosen, padded.unsqueeze(-1), others)


@composes(torch.trace, Tensor.trace)
def trace(func: Callable[..., Tensor], x: Any) -> Tensor:
    """Sum of the diagonal; the sums of the ranks are added up."""
    (x,) = cast_for(torch.trace, x)
    return x.tril().triu().sum(dtype=x.dtype if x.is_floating_point() else None)


@composes(linalg.matrix_norm, linalg.norm,
          limits="orders 2, -2 and 'nuc' need whole matrices")  # fmt: skip
def matrix_norm(
    func: Callable[..., Tensor],
    x: Any,
    ord: Any = None,  # noqa: A002 - torch's name of the argument
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Take norms of matrices; `linalg.norm` of one dim, or without an order, is of vectors."""
    x = x if dtype is None else x.to(dtype)
    if func is linalg.norm:
        vectors = isinstance(dim, int) or (dim is not None and len(dim) == 1)
        if vectors or ord is None or (dim is None and x.ndim == 1):
            return linalg.vector_norm(x, 2 if ord is None else ord, dim, keepdim)
    order: Any = ord
    dims: Any = (-2, -1) if dim is None else dim
    rows, columns = (d % x.ndim for d in dims)
    if order in (None, "fro"):
        return linalg.vector_norm(x, 2, (rows, columns), keepdim)
    if order in (1, -1, math.inf, -math.inf):
        summed, compared = (rows, columns) if abs(order) == 1 else (columns, rows)
        sums = x.abs().sum(summed, keepdim=True)
        pick = sums.sum if not sums.shape[compared] else sums.amax if order > 0 else sums.amin
        found = pick(compared, keepdim=True)
    else:
        values = linalg.svdvals(x.movedim((rows, columns), (-2, -1)))
        chosen = {"nuc": values.sum, 2: values.amax, -2: values.amin}.get(order)
        if chosen is None:
            raise RuntimeError(f"linalg.matrix_norm: order {order!r} is not supported")
        found = chosen(-1)
        for d in sorted((rows, columns)):
            found = found.unsqueeze(d)
    return found if keepdim else found.squeeze((rows, columns))
