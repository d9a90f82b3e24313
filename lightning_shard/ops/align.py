"""Operands that meet: which layout they share, and the local part of each in it."""

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.comm import transpose
from lightning_shard.domain import Subdomain
from lightning_shard.halo import fetch, fetch_all, needs_of, route_of
from lightning_shard.layout import Dim, Factor, Grid, Layout, merge, part_sizes
from lightning_shard.ops.registry import UnsupportedOperationError


def subdomains(values: Any) -> list[Subdomain]:
    """All `Subdomain`s in nested lists, tuples and dicts, in order."""
    if isinstance(values, Subdomain):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [s for v in values for s in subdomains(v)]


def take_local(x: Tensor, dim: int, factors: Dim, grid: Grid) -> Tensor:
    """This rank's part of a plain tensor's `dim`, split as `factors` say."""
    if len(factors) == 1:
        low, high = factors[0].bounds(grid)
        return x.narrow(dim, low, high - low)
    x = x.unflatten(dim, [f.extent for f in factors])
    for offset, factor in enumerate(factors):
        low, high = factor.bounds(grid)
        x = x.narrow(dim + offset, low, high - low)
    return x.flatten(dim, dim + len(factors) - 1)


def take_part(x: Tensor, layout: Layout) -> Tensor:
    """This rank's part of a plain tensor of the layout's global shape."""
    for d in layout.split_dims:
        x = take_local(x, d, layout.dims[d], layout.grid)
    return x


def whole(x: Subdomain, dim: int) -> Subdomain:
    """The same tensor with every row of `dim` on every rank."""
    if not x.layout.axes(dim):
        return x
    layout = x.layout.with_dim(dim, x.shape[dim], axes=())
    return x.like(fetch_all(x, dim), layout)


def gathered(x: Subdomain) -> Tensor:
    """The full tensor on every rank; its gradient goes back to the owners, added up."""
    flat = Layout(tuple((f,) for dim in x.layout.dims for f in dim), x.layout.grid)
    parts = x.like(x.local.reshape(flat.local_shape), flat)
    for dim in flat.split_dims:
        parts = parts.like(fetch_all(parts, dim), parts.layout.with_dim(dim, parts.shape[dim], ()))
    return parts.local.reshape(x.shape)


def simple(x: Subdomain, dim: int) -> Subdomain:
    """The same tensor with `dim` of one factor.

    Rows of a flattened product of dims are moved to the canonical partition of the product.
    """
    factors = merge(x.layout.dims[dim])
    if len(factors) == 1:
        return x.view(x.local, x.layout.with_dims({dim: factors}))
    layout = x.layout.with_dim(dim, x.shape[dim])
    parts = layout.grid.parts(layout.axes(dim))
    needs = needs_of(x.shape[dim], parts, lambda low, high: [(low, high)])
    moved = x.moved or route_of(x, dim, needs).moves
    return Subdomain(fetch(x, dim, needs), layout, x.domain, moved)


def split_moved(x: Subdomain, dim: int, other: int, factors: Dim | None = None) -> Subdomain:
    """The same tensor with the split of `dim` moved to the whole dim `other`, by an all-to-all.

    Args:
        x: Its dim `dim` is split.
        dim: Becomes whole.
        other: Becomes split over the same ranks.
        factors: How `other` is split; canonically if None.
    """
    axes, grid, device = x.layout.axes(dim), x.layout.grid, x.local.device
    factors = factors or (Factor(x.shape[other], axes),)
    rows, order = rows_by_owner(x.layout.dims[dim], grid)
    others, other_order = rows_by_owner(factors, grid)
    local = x.local
    if other_order is not None:
        local = local.index_select(other, other_order.to(device))
    local = transpose(local, other, dim, others, rows, x.domain.group(axes))
    if order is not None:
        local = local.index_select(dim, order.argsort().to(device))
    return x.like(local, x.layout.with_dim(dim, x.shape[dim], ()).with_dims({other: factors}))


def places_by_rank(factors: Dim, axes: tuple[int, ...], grid: Grid) -> list[Tensor]:
    """The global rows, in their local order, that each rank along `axes` has of a dim."""
    rows = torch.arange(math.prod(f.extent for f in factors))
    found = []
    for coord in itertools.product(*(range(grid.sizes[a]) for a in axes)):
        place = dict(enumerate(grid.coord)) | dict(zip(axes, coord, strict=True))
        found.append(take_local(rows, 0, factors, Grid(grid.sizes, tuple(place.values()))))
    return found


def rows_by_owner(factors: Dim, grid: Grid) -> tuple[list[int], Tensor | None]:
    """How many rows of a split dim each rank holds, and all rows in the order of the ranks.

    The order is None where it is that of the rows.
    """
    axes = tuple(sorted(a for f in factors for a in f.axes))
    if len(merge(factors)) == 1:
        (factor,) = merge(factors)
        return part_sizes(factor.extent, grid.parts(axes)), None
    places = places_by_rank(factors, axes, grid)
    return [len(each) for each in places], torch.cat(places)


def broadcasting(x: Subdomain | Tensor, dims: Collection[int]) -> Subdomain | Tensor:
    """A stand-in for `x` in `common_layout`, whose `dims` are of extent 1."""
    if isinstance(x, Subdomain):
        return x.like(x.local, x.layout.with_dims({d: (Factor(1),) for d in dims}))
    return x.new_empty(()).expand([1 if d in dims else n for d, n in enumerate(x.shape)])


def common_layout(operands: Sequence[Subdomain | Tensor]) -> Layout:
    """The layout of the broadcast result of `operands`; a plain tensor is whole on every rank.

    Where operands are split over the same ranks in different dims, the largest (of these the first)
    decides; `local_part` moves the others.
    """
    shape = torch.broadcast_shapes(*(tuple(o.shape) for o in operands))
    split = [o for o in operands if isinstance(o, Subdomain)]
    if any(s.domain is not split[0].domain for s in split):
        raise split_differently(split)
    if not split:
        raise UnsupportedOperationError("none of the operands that may be split is split")
    layout = Layout.of(shape, {}, split[0].layout.grid)
    for o in sorted(split, key=lambda o: -math.prod(o.shape)):
        for d in o.layout.split_dims:
            target = layout.ndim - o.ndim + d
            candidate: Dim | None = o.layout.dims[d]
            if o.shape[d] != shape[target]:
                continue
            if layout.axes(target):
                candidate = common_dim(layout.dims[target], candidate)
            elif set(o.layout.axes(d)) & set(layout.axes()):
                continue
            if candidate is None:
                raise split_differently(split)
            layout = layout.with_dims({target: candidate})
    return layout


def split_differently(operands: Sequence[Subdomain | Tensor]) -> UnsupportedOperationError:
    """The refusal of operands whose split dims do not fit together."""
    layouts = "; ".join(str(o.layout) for o in operands if isinstance(o, Subdomain))
    return UnsupportedOperationError(f"the operands are split differently: {layouts}")


def common_dim(a: Dim, b: Dim) -> Dim | None:
    """The dim that both split dims can be brought to: of one factor, if the axes are the same."""
    if merge(a) == merge(b):
        return a
    axes = [tuple(sorted(axis for f in dim for axis in f.axes)) for dim in (a, b)]
    extent = math.prod(f.extent for f in a)
    return (Factor(extent, axes[0]),) if axes[0] == axes[1] else None


def local_part(x: Subdomain | Tensor, layout: Layout) -> Tensor:
    """The local tensor that stands for `x` in an operation whose broadcast result has `layout`."""
    if isinstance(x, Subdomain):
        for d in x.layout.split_dims:
            target = layout.ndim - x.ndim + d
            if x.shape[d] == 1 and layout.shape[target] > 1:
                x = whole(x, d)
            elif not layout.axes(target):
                x = _split_elsewhere(x, d, layout)
            elif merge(x.layout.dims[d]) != merge(layout.dims[target]):
                x = simple(x, d)
                if merge(x.layout.dims[d]) != merge(layout.dims[target]):
                    raise split_differently([x])
    local = x.local if isinstance(x, Subdomain) else x
    for d in layout.split_dims:
        own = d - (layout.ndim - x.ndim)
        if own < 0 or x.shape[own] == 1 != layout.shape[d]:
            continue
        if not (isinstance(x, Subdomain) and x.layout.axes(own)):
            local = take_local(local, own, layout.dims[d], layout.grid)
    return local


def _split_elsewhere(x: Subdomain, dim: int, layout: Layout) -> Subdomain:
    """The same tensor, `dim` whole, and the dim that `layout` splits over the same ranks split."""
    axes, added = x.layout.axes(dim), layout.ndim - x.ndim
    other = next((t - added for t in layout.split_dims if layout.axes(t) == axes), None)
    if other is None or len(merge(layout.dims[other + added])) > 1:
        raise split_differently([x, x.like(x.local, layout)])
    if other < 0 or x.shape[other] == 1:
        return whole(x, dim)
    if x.layout.axes(other):
        raise split_differently([x, x.like(x.local, layout)])
    return split_moved(x, dim, other)


def volume(layout: Layout, dims: Sequence[int]) -> int:
    """The number of elements along `dims` of the global tensor."""
    return math.prod(layout.shape[d] for d in dims)
