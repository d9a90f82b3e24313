"""Moves rows from one layout of a tensor to another.

Dims are moved one after the other. A dim may be moved while no other one is split over ranks along
which its new rows differ: then all ranks that hold those rows hold the same rows of the other dims.
"""

import itertools
import math
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import Needs, Span, fetch, fetch_all
from lightning_shard.domain.layout import Dim, Grid, Layout, merge
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.torch_private.typed import integers


def take_local(x: Tensor, dim: int, factors: Dim, grid: Grid) -> Tensor:
    """Cut this rank's part, perhaps a sparse one, out of a plain `dim` split by `factors`."""
    if x.layout != torch.strided:
        if x.requires_grad:
            raise UnsupportedOperationError("a part of a sparse tensor has no gradient in torch")
        rows = take_local(torch.arange(x.shape[dim], device=x.device), 0, factors, grid)
        return x.to_sparse_coo().index_select(dim, rows)
    if len(factors) == 1:
        low, high = factors[0].bounds(grid)
        return x.narrow(dim, low, high - low)
    x = torch.unflatten(x, dim, [f.extent for f in factors])
    for offset, factor in enumerate(factors):
        low, high = factor.bounds(grid)
        x = x.narrow(dim + offset, low, high - low)
    return x.flatten(dim, dim + len(factors) - 1)


def places_by_rank(factors: Dim, axes: tuple[int, ...], grid: Grid) -> list[Tensor]:
    """Return the global rows, in their local order, that each rank along `axes` has of a dim."""
    rows = torch.arange(math.prod(f.extent for f in factors), device="cpu")
    found: list[Tensor] = []
    for coord in itertools.product(*(range(grid.sizes[a]) for a in axes)):
        place = dict(enumerate(grid.coord)) | dict(zip(axes, coord, strict=True))
        found.append(take_local(rows, 0, factors, Grid(grid.sizes, tuple(place.values()))))
    return found


def relaid(x: Subdomain, target: Layout) -> Subdomain:
    """Make each split dim either whole, or split as `target` splits it."""
    while waiting := [d for d in x.layout.split_dims if not _is_alike(x.layout, target, d)]:
        free = [d for d in waiting if not _others(x.layout, d) & {*target.axes(d)}]
        dim = (free or waiting)[0]
        if free and target.axes(dim):
            rows = fetch(x, dim, _needs(target.dims[dim], x.layout.axes(dim), x.layout.grid))
            x = x.like(rows, x.layout.with_dims({dim: target.dims[dim]}))
        else:
            x = x.like(fetch_all(x, dim), x.layout.with_dim(dim, x.shape[dim], ()))
    return x


def _is_alike(own: Layout, target: Layout, dim: int) -> bool:
    return merge(own.dims[dim]) == merge(target.dims[dim])


def _others(layout: Layout, dim: int) -> set[int]:
    """The mesh axes that split other dims."""
    return {a for d in layout.split_dims if d != dim for a in layout.axes(d)}


@lru_cache(maxsize=1024)
def _needs(target: Dim, axes: tuple[int, ...], grid: Grid) -> Needs:
    """The rows that `target` gives to each rank along `axes`, as spans."""
    return tuple(_spans(integers(rows)) for rows in places_by_rank(target, axes, grid))


def _spans(rows: list[int]) -> tuple[Span, ...]:
    """Rows that follow each other as one span; a rank may have no rows."""
    starts = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] + 1]
    cuts = [*starts, len(rows)]
    return tuple((rows[i], rows[j - 1] + 1) for i, j in pairwise(cuts))
