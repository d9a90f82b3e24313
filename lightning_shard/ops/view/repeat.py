"""Copies rows: repeats, tiles and interleaves them, and spreads them over a grid."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import (
    common_layout,
    gathered,
    local_part,
    one_factor,
    spread,
    subdomains,
    take_local,
)
from lightning_shard.domain.comm import of_all
from lightning_shard.domain.layout import Factor, Layout, partition
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.uneven import exchange_rows, spans_of
from lightning_shard.ops.registry import implements, listed
from lightning_shard.ops.view.aligned import Operand, as_split, brought
from lightning_shard.ops.view.index import chosen_rows
from lightning_shard.ops.view.reshape import flatten, unsqueeze
from lightning_shard.processes.torch_private.typed import integers, typed_torch


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


@implements(torch.repeat_interleave, Tensor.repeat_interleave)
def repeat_interleave(
    func: Callable[..., Any],
    x: Operand,
    repeats: int | Operand | None = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Subdomain:
    """Repeat each row as often as all others, or as its own number says, split or plain.

    Of numbers of repeats alone, give each row's number as often as it says.
    """
    if repeats is None:
        assert isinstance(x, Subdomain)
        rows = torch.arange(x.shape[0], device=x.local.device)
        return by_counts(as_split(rows, x), 0, x, output_size)
    if dim is None:
        x, dim = flatten(torch.flatten, x) if isinstance(x, Subdomain) else x.flatten(), 0
    d = dim % x.ndim
    if isinstance(repeats, int):
        count = repeats
    elif repeats.ndim and repeats.shape[0] != 1:
        owner = subdomains([x, repeats])[0]
        return by_counts(as_split(x, owner), d, repeats, output_size)
    else:
        count = int(gathered(repeats) if isinstance(repeats, Subdomain) else repeats)
    x = x if isinstance(x, Subdomain) else as_split(x, subdomains([repeats])[0])
    if x.layout.axes(d):
        return chosen_rows(x, d, x.shape[d] * count, lambda o: o // count)
    return _interleaved(x, d, count)


def by_counts(x: Subdomain, d: int, counts: Operand, output_size: int | None) -> Subdomain:
    """Repeat each row of `d` as often as its number says; rows then move to where they belong.

    Raises:
        RuntimeError: A number is negative, on any rank; or their sum is not `output_size`.
        UnsupportedOperationError: The call is being compiled.
    """
    own = counts.layout.axes(0) if isinstance(counts, Subdomain) else ()
    others = {a for e in x.layout.split_dims if e != d for a in x.layout.axes(e)}
    if not x.layout.axes(d) and (not own or others & set(own)):
        return _interleaved(x, d, gathered(counts) if isinstance(counts, Subdomain) else counts)
    if x.layout.axes(d):
        x = one_factor(x, d)
        factors = x.layout.dims[d]
        rows = x.local
    else:
        factors = (Factor(x.shape[d], own),)
        rows = take_local(x.local, d, factors, x.layout.grid)
    often = brought(counts, Layout((factors,), x.layout.grid)).to(rows.device)
    axes, grid = factors[0].axes, x.layout.grid
    group = x.domain.group(axes)
    least = often.min() if len(often) else often.new_zeros(())
    sums = of_all(torch.stack([often.sum(), least]), group).cpu()
    if int(sums[:, 1].min()) < 0:
        raise RuntimeError("repeats can not be negative")
    sizes = integers(sums[:, 0])
    total = sum(sizes)
    if output_size not in (None, total):
        raise RuntimeError(f"allocated size {output_size} does not match required size {total}")
    wanted = list(pairwise(partition(total, grid.parts(axes))))
    local = rows.repeat_interleave(often, d)
    local = exchange_rows(local, d, spans_of(sizes), wanted, group)
    return x.chosen(local, x.layout.with_dim(d, total, axes))


def _interleaved(x: Subdomain, dim: int, repeats: int | Tensor) -> Subdomain:
    local = x.local.repeat_interleave(repeats, dim)
    return x.chosen(local, x.layout.with_dim(dim, local.shape[dim]))


@implements(typed_torch.broadcast_tensors)
def broadcast_tensors(func: Callable[..., Any], *tensors: Any) -> tuple[Subdomain, ...]:
    """Expand tensors to their common shape; rows travel where splits differ."""
    operands = listed(tensors)
    layout = common_layout(operands)
    owner = subdomains(operands)[0]
    return tuple(spread(o, layout, owner) for o in operands)


@implements(torch.meshgrid)
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
    """Keep the elements on and below a diagonal; nothing travels."""
    return x.like(x.local.masked_fill(_diagonals(x) > diagonal, 0))


@implements(torch.triu, Tensor.triu)
def triu(func: Callable[..., Any], x: Subdomain, diagonal: int = 0) -> Subdomain:
    """Keep the elements on and above a diagonal; nothing travels."""
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
