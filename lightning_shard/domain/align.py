"""Finds the layout that the operands of a function share, and the local part of each in it."""

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.comm import all_reduce, of_all, transpose
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import fetch, fetch_all, needs_of, route_of
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.half import wide
from lightning_shard.domain.layout import Dim, Factor, Grid, Layout, layout_of, merge, part_sizes
from lightning_shard.domain.relayout import places_by_rank, relaid, take_local
from lightning_shard.domain.strides import of_view
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.narrow import is_dict, is_list
from lightning_shard.processes.torch_private.internals import storage_key
from lightning_shard.processes.torch_private.typed import typed_torch


def subdomains(values: Any) -> list[Subdomain]:
    """Return all `Subdomain`s in nested lists, tuples and dicts, in order."""
    if isinstance(values, Subdomain):
        return [values]
    items = values.values() if is_dict(values) else values if is_list(values) else ()
    return [s for v in items for s in subdomains(v)]


def in_own_memory(result: Subdomain, given: Subdomain) -> Subdomain:
    """Return the tensor in memory of its own, where torch never returns that of `given`.

    A write into the result would else change what it was made from.
    """
    if storage_key(result.local) == storage_key(given.local):
        return result.alike(result.local.clone())
    return result


def all_in_rows(operands: Sequence[Subdomain | Tensor]) -> bool:
    """Return True if all tensors lie row by row, split ones as the whole of them does."""
    for x in operands:
        lies = x.is_contiguous() if isinstance(x, Tensor) else x.strides == x.layout.strides
        if not lies:
            return False
    return True


def own_part(x: Tensor, layout: Layout) -> Tensor:
    """Copy this rank's part of a plain tensor; its dims lie in memory in the order of the whole."""
    part = take_part(x, layout)
    # the strides of a part of one row, which a view of the whole has, would say nothing
    stored = torch.contiguous_format if part.is_contiguous() else torch.preserve_format
    return part.clone(memory_format=stored)


def take_part(x: Tensor, layout: Layout) -> Tensor:
    """Cut this rank's part out of a plain tensor of the layout's global shape."""
    for d in layout.split_dims:
        x = take_local(x, d, layout.dims[d], layout.grid)
    return x


def whole(x: Subdomain, dim: int) -> Subdomain:
    """Bring every row of `dim` to every rank."""
    if not x.layout.axes(dim):
        return x
    layout = x.layout.with_dim(dim, x.shape[dim], axes=())
    return x.like(fetch_all(x, dim), layout)


def gathered(x: Subdomain) -> Tensor:
    """Gather the full tensor on every rank; its gradient goes back to the owners, added up.

    It lies in memory alike on all ranks, or a view on one would be a copy on another.
    """
    flat = Layout(tuple((f,) for dim in x.layout.dims for f in dim), x.layout.grid)
    parts = x.like(x.local.reshape(flat.local_shape), flat)
    for dim in flat.split_dims:
        parts = parts.like(fetch_all(parts, dim), parts.layout.with_dim(dim, parts.shape[dim], ()))
    found = parts.local.reshape(x.shape)
    return found.contiguous(memory_format=x.memory_format) if flat.split_dims else found


def one_factor(x: Subdomain, dim: int) -> Subdomain:
    """Return the same tensor with `dim` of one factor.

    Rows of a flattened product of dims are moved to the canonical partition of the product.
    """
    if len(x.layout.dims[dim]) == 1:
        return x
    factors = merge(x.layout.dims[dim])
    if len(factors) == 1:
        return x.view(x.local, x.layout.with_dims({dim: factors}), x.strides)
    layout = x.layout.with_dim(dim, x.shape[dim])
    parts = layout.grid.parts(layout.axes(dim))
    needs = needs_of(x.shape[dim], parts, lambda low, high: [(low, high)])
    if not route_of(x, dim, needs).moves:  # each rank has its rows, in order
        return x.view(x.local, layout, x.strides)
    return x.copy(fetch(x, dim, needs), layout, x.strides, index=(slice(None),) * x.ndim)


def split_moved(x: Subdomain, dim: int, other: int, factors: Dim | None = None) -> Subdomain:
    """Move the split of `dim` to the whole dim `other`, by an all-to-all.

    Args:
        x: Its dim `dim` is split.
        dim: Becomes whole.
        other: Becomes split over the same ranks.
        factors: The split of `other`; canonical if None.
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


def rows_by_owner(factors: Dim, grid: Grid) -> tuple[list[int], Tensor | None]:
    """Count each rank's rows of a split dim, and list all rows rank by rank.

    The list is None where that is their global order.

    The order is None where it is that of the rows.
    """
    axes = tuple(sorted(a for f in factors for a in f.axes))
    first, *others = merge(factors)
    if not any(f.axes for f in others):  # each rank has rows that follow each other
        each = math.prod(f.extent for f in others)
        return [n * each for n in part_sizes(first.extent, grid.parts(axes))], None
    places = places_by_rank(factors, axes, grid)
    return [len(each) for each in places], torch.cat(places)


def spread(x: Subdomain | Tensor, layout: Layout, owner: Subdomain) -> Subdomain:
    """`x` in the layout to which it is broadcast, its rows repeated without copies.

    torch gives a view. What is a copy here, or lies on some ranks only, is not to be written.

    Args:
        x: A split tensor, or a plain one, which is whole on every rank.
        layout: The layout of the result.
        owner: A split tensor of the same domain.
    """
    part = local_part(x, layout)
    local = part.expand(layout.local_shape)
    if not isinstance(x, Subdomain):  # where a rank would write its own rows of the whole
        strides = of_view(tuple(x.shape), x.stride(), "expand", layout.shape)
        is_part = bool(layout.split_dims)
        return owner.in_rows(x.new_empty(1)).copy(local, layout, strides, moved=is_part)
    added = layout.ndim - x.ndim
    repeated = (d for d in layout.split_dims if d < added or x.shape[d - added] < layout.shape[d])
    moved = part is not x.local or any(True for _ in repeated)
    return x.copy(local, layout, x.strides_of("expand", layout.shape), moved=moved)


def broadcasting(x: Subdomain | Tensor, dims: Collection[int]) -> Subdomain | Tensor:
    """Make a stand-in for `x` in `common_layout`, whose `dims` are of extent 1."""
    if isinstance(x, Subdomain):
        layout = x.layout
        for d in dims:
            layout = layout.with_dim(d, 1, ())
        return x.like(x.local, layout)
    return x.new_empty(()).expand([1 if d in dims else n for d, n in enumerate(x.shape)])


def common_layout(operands: Sequence[Subdomain | Tensor]) -> Layout:
    """Find the layout of the broadcast result of `operands`; plain ones are whole on all ranks.

    Where operands are split differently, the largest (of these the first) decides; `local_part`
    moves the others.
    """
    split = [o for o in operands if isinstance(o, Subdomain)]
    if split and all(_fits_into(o, split[0]) for o in operands):
        return split[0].layout
    if not split or any(s.domain is not split[0].domain for s in split):
        typed_torch.broadcast_shapes(*(tuple(o.shape) for o in operands))  # its error comes first
        if split:
            raise split_differently(split)
        raise UnsupportedOperationError("none of the operands that may be split is split")
    kinds = tuple([o.layout if isinstance(o, Subdomain) else tuple(o.shape) for o in operands])
    return _common_layout(kinds, split[0].layout.grid)


@lru_cache(maxsize=4096)
def _common_layout(kinds: tuple[Layout | tuple[int, ...], ...], grid: Grid) -> Layout:
    """That of operands with these layouts, and of plain ones with these shapes."""
    split = [k for k in kinds if isinstance(k, Layout)]
    shapes = [k.shape if isinstance(k, Layout) else k for k in kinds]
    shape = typed_torch.broadcast_shapes(*shapes)
    layout = Layout.of(shape, {}, grid)
    for own in sorted(split, key=lambda own: -math.prod(own.shape)):
        for d in own.split_dims:
            target = layout.ndim - own.ndim + d
            candidate: Dim | None = own.dims[d]
            if own.shape[d] != shape[target]:
                continue
            if layout.axes(target):
                candidate = common_dim(layout.dims[target], candidate)
            elif set(own.axes(d)) & set(layout.axes()):
                continue
            if candidate is None:
                continue
            layout = layout.with_dims({target: candidate})
    return layout


def _fits_into(x: Subdomain | Tensor, first: Subdomain) -> bool:
    """Return True if `x` is laid out as `first` is, or is one number."""
    if isinstance(x, Tensor):
        return x.ndim == 0
    return x is first or (x.domain is first.domain and x.layout == first.layout)


def split_differently(operands: Sequence[Subdomain | Tensor]) -> UnsupportedOperationError:
    """Make the refusal of operands whose split dims do not fit together."""
    shown = "; ".join(str(o.layout) for o in operands if isinstance(o, Subdomain))
    return UnsupportedOperationError(f"the operands are split differently: {shown}")


def common_dim(a: Dim, b: Dim) -> Dim | None:
    """Find the dim that both split dims can be brought to: of one factor, if the axes are alike."""
    if merge(a) == merge(b):
        return a
    axes = [tuple(sorted(axis for f in dim for axis in f.axes)) for dim in (a, b)]
    extent = math.prod(f.extent for f in a)
    return (Factor(extent, axes[0]),) if axes[0] == axes[1] else None


def local_part(x: Subdomain | Tensor, layout: Layout) -> Tensor:
    """Return the local tensor that stands for `x` where the broadcast result has `layout`."""
    if isinstance(x, Subdomain):
        if x.layout is layout or x.layout == layout:
            return x.local
        x = _moved_to(x, layout)
        return _sliced(x.local, x.shape, layout, x.layout.split_dims)
    return _sliced(x, x.shape, layout)


def _moved_to(x: Subdomain, layout: Layout) -> Subdomain:
    """The same tensor, every dim either whole or split as `layout` splits the result's."""
    added = layout.ndim - x.ndim
    for d in x.layout.split_dims:
        alike = merge(x.layout.dims[d]) == merge(layout.dims[added + d])
        is_split = bool(layout.axes(added + d))
        if x.shape[d] == 1 and (layout.shape[added + d] > 1 or (is_split and not alike)):
            x = whole(x, d)  # one row, which every rank needs, or another rank than its owner
        elif not is_split:
            x = _split_elsewhere(x, d, layout)
        elif not alike and x.layout.axes(d) == layout.axes(added + d):
            x = one_factor(x, d)
    spread = [d for d, n in enumerate(x.shape) if n != layout.shape[added + d]]
    target = layout_of(layout.dims[added:], layout.grid)
    return relaid(x, target.with_dims({d: (Factor(1),) for d in spread}))


def _sliced(
    local: Tensor, shape: Sequence[int], layout: Layout, split: Collection[int] = ()
) -> Tensor:
    """This rank's rows of a tensor of `shape`, of which it has all but along the dims `split`."""
    for dim in _cut(tuple(shape), layout, tuple(split)):
        factors = layout.dims[dim + layout.ndim - len(shape)]
        local = take_local(local, dim, factors, layout.grid)
    return local


@lru_cache(maxsize=4096)
def _cut(shape: tuple[int, ...], layout: Layout, split: tuple[int, ...]) -> list[int]:
    """The dims of a tensor of `shape`, whole but for `split`, of which a rank takes its rows."""
    added = layout.ndim - len(shape)
    found: list[int] = []
    for d in layout.split_dims:
        own = d - added
        is_broadcast = own < 0 or (shape[own] == 1 and layout.shape[d] != 1)
        if not is_broadcast and own not in split:
            found.append(own)
    return found


def _split_elsewhere(x: Subdomain, dim: int, layout: Layout) -> Subdomain:
    """The same tensor, `dim` whole, and the dim that `layout` splits over the same ranks split."""
    axes, added = x.layout.axes(dim), layout.ndim - x.ndim
    other = next((t - added for t in layout.split_dims if layout.axes(t) == axes), None)
    if other is None:
        return whole(x, dim) if x.shape[dim] == 1 else x
    if other < 0 or x.shape[other] == 1:
        return whole(x, dim)
    if x.layout.axes(other) or len(merge(layout.dims[other + added])) > 1:
        return x
    return split_moved(x, dim, other)


def volume(layout: Layout, dims: Sequence[int]) -> int:
    """Count the elements along `dims` of the global tensor."""
    return math.prod(layout.shape[d] for d in dims)


def sum_over(x: Subdomain, local: Tensor, dims: Sequence[int]) -> Tensor:
    """Add up partial sums over the ranks that split `dims` of `x`."""
    axes = x.layout.axes(*dims) if dims else ()
    if not axes:
        return local
    return all_reduce(wide(local), x.domain.group(axes)).to(local.dtype)


def all_gather_small(x: Subdomain, axes: tuple[int, ...], part: Tensor) -> Tensor:
    """Gather the `part`s of all ranks along `axes`, alike in shape, stacked in order."""
    if not axes:
        return part.unsqueeze(0)
    grid = x.layout.grid
    if grid.parts(axes) == 1:
        return part.unsqueeze(0)
    recorded = (torch.is_grad_enabled() and part.requires_grad) or in_forward_mode()
    if not recorded:
        return of_all(part, x.domain.group(axes))
    layout = Layout.of((grid.parts(axes), *part.shape), {0: axes}, grid)
    return fetch_all(x.like(part.unsqueeze(0), layout), 0)
