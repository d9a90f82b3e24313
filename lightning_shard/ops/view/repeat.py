"""Copies rows: repeats, tiles and interleaves them, and spreads them over a grid."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import common_layout, local_part, subdomains
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements, listed
from lightning_shard.ops.view.index import chosen_rows
from lightning_shard.ops.view.reshape import flatten, unsqueeze
from lightning_shard.processes.torch_internals import meshgrid as meshgrid_of_cpp
from lightning_shard.processes.typed import integers, typed_torch

Operand = Subdomain | Tensor


@implements(Tensor.repeat, torch.tile, Tensor.tile)
def repeat(func: Callable[..., Any], x: Subdomain, *sizes: Any, **kwargs: Any) -> Subdomain:
    """Whole dims are copied locally; of a split dim each rank fetches the rows of its part."""
    counts = [int(n) for n in listed(sizes or tuple(kwargs.values()))]
    counts = [1] * (x.ndim - len(counts)) + counts
    added = len(counts) - x.ndim
    for d in x.layout.split_dims:
        n, count = x.shape[d], counts[added + d]
        if count != 1:
            x = chosen_rows(x, d, n * count, lambda o, n=n: o % n)
            counts[added + d] = 1
    dims = tuple(
        x.layout.dims[d - added]
        if d >= added and n == 1
        else (Factor(n * (x.shape[d - added] if d >= added else 1)),)
        for d, n in enumerate(counts)
    )
    return x.like(x.local.repeat(counts), Layout(dims, x.layout.grid))


@implements(
    torch.repeat_interleave, Tensor.repeat_interleave, limits="the numbers of repeats must be plain"
)
def repeat_interleave(
    func: Callable[..., Any],
    x: Subdomain,
    repeats: int | Tensor | None = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Subdomain:
    if isinstance(repeats, Subdomain) or repeats is None:
        raise UnsupportedOperationError("repeat_interleave with split numbers of repeats")
    if dim is None:
        x, dim = flatten(torch.flatten, x), 0
    d = x.layout.dim(dim)
    extent = x.shape[d]
    if isinstance(repeats, Tensor) and repeats.numel() > 1:
        rows = [row for row, count in enumerate(integers(repeats)) for _ in range(count)]
        return (
            chosen_rows(x, d, len(rows), rows.__getitem__)
            if x.layout.axes(d)
            else _interleaved(x, d, repeats)
        )
    times = int(repeats)
    if x.layout.axes(d):
        return chosen_rows(x, d, extent * times, lambda o: o // times)
    return _interleaved(x, d, times)


def _interleaved(x: Subdomain, dim: int, repeats: int | Tensor) -> Subdomain:
    local = x.local.repeat_interleave(repeats, dim)
    return x.like(local, x.layout.with_dim(dim, local.shape[dim]))


@implements(typed_torch.broadcast_tensors)
def broadcast_tensors(func: Callable[..., Any], *tensors: Any) -> tuple[Subdomain, ...]:
    operands = listed(tensors)
    layout = common_layout(operands)
    owner = subdomains(operands)[0]
    return tuple(
        owner.like(local_part(o, layout).expand(layout.local_shape), layout) for o in operands
    )


@implements(torch.meshgrid, meshgrid_of_cpp)
def meshgrid(
    func: Callable[..., Any], *tensors: Any, indexing: str | None = None
) -> tuple[Subdomain, ...]:
    """Each tensor spans a dim of its own; with `indexing="xy"` the first two change places."""
    operands = listed(tensors)
    order = list(range(len(operands)))
    if indexing == "xy" and len(order) > 1:
        order[:2] = 1, 0
    spread = [_along(o, order[i], len(order)) for i, o in enumerate(operands)]
    return broadcast_tensors(func, spread)


def _along(x: Operand, dim: int, ndim: int) -> Operand:
    """A tensor of one dim (or none) as dim `dim` of `ndim`, the others of extent 1."""
    if isinstance(x, Subdomain):
        for d in range(ndim):
            x = x if d == dim else unsqueeze(torch.unsqueeze, x, d)
        return x
    return x.reshape([-1 if d == dim else 1 for d in range(ndim)])


@implements(torch.tril, Tensor.tril)
def tril(func: Callable[..., Any], x: Subdomain, diagonal: int = 0) -> Subdomain:
    return x.like(x.local.masked_fill(_diagonals(x) > diagonal, 0))


@implements(torch.triu, Tensor.triu)
def triu(func: Callable[..., Any], x: Subdomain, diagonal: int = 0) -> Subdomain:
    return x.like(x.local.masked_fill(_diagonals(x) < diagonal, 0))


def _diagonals(x: Subdomain) -> Tensor:
    """The number of the diagonal of the whole matrix on which each local element lies."""
    return _numbers(x, x.ndim - 1) - _numbers(x, x.ndim - 2)[:, None]


def _numbers(x: Subdomain, dim: int) -> Tensor:
    """The global numbers of this rank's rows of `dim`."""
    rows = torch.arange(x.shape[dim], device=x.local.device)
    if not x.layout.axes(dim):
        return rows
    row_dim = Layout((x.layout.dims[dim],), x.layout.grid)
    return local_part(rows, row_dim)
