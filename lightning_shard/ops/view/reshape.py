"""Reshapes: factors are regrouped, data stays.

Merging dims always keeps every element where it is: the merged dim remembers its factors.
Splitting a split dim of N rows into (n, N / n) moves rows between neighbours only where the
partition of N rows is not that of n times N / n. A reshape that cuts across dims, as (3, 4) to
(2, 6), moves rows to the canonical partition of their product.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import common_layout, one_factor, spread, whole
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import fetch, route_of
from lightning_shard.domain.layout import Dim, Factor, Grid, Layout, layout_of, merge, partition
from lightning_shard.domain.memory_format import dims_in_memory
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.elementwise.pointwise import convert
from lightning_shard.ops.registry import implements, listed
from lightning_shard.processes.torch_private.typed import typed_torch


def reshape_to(x: Subdomain, shape: Sequence[int]) -> Subdomain:
    """Regroup the factors of `x` into dims of `shape` (one entry may be -1)."""
    shape = _resolved(x.shape, tuple(map(int, shape)))
    if shape == x.shape:
        return x.alias()
    return _in_order(x, shape, partial(_reshaped, shape=shape))


def _reshaped(x: Subdomain, shape: tuple[int, ...]) -> Subdomain:
    layout = _kept.get((x.layout, shape))
    if layout is not None:
        return _laid_out(x, layout)
    result = _regrouped(x, shape)
    if shape and not result.copied:
        if len(_kept) >= _LIMIT:
            _kept.clear()
        _kept[x.layout, shape] = result.layout
        return _laid_out(x, result.layout)  # one step may give a view where several do not
    return result


_LIMIT = 4096
_kept: dict[tuple[Layout, tuple[int, ...]], Layout] = {}  # reshapes for which no row moves


def _in_order(
    x: Subdomain, shape: tuple[int, ...], regroup: Callable[[Subdomain], Subdomain]
) -> Subdomain:
    """Regroup dims, as torch does with the order of the whole tensor in memory.

    If torch would copy it, the result is a copy on all ranks. If nobody knows, it is read only.
    """
    known = x.knows_order
    by_order = known and (x.stored == () or not x.is_in_order)
    if (by_order and not (x.stored and x.layout.leaves_one_row)) or (
        _without_ones(x.shape) == _without_ones(shape)  # a view in any order
    ):
        return regroup(x)
    if by_order and x.copied is None and x.stored and _is_copied(x.shape, x.stored, shape):
        return regroup(x.in_rows(x.local.clone(memory_format=torch.contiguous_format)))
    result = regroup(x)
    return x.copy(result.local, result.layout)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([n for n in shape if n != 1])


def _laid_out(x: Subdomain, layout: Layout) -> Subdomain:
    """`x` with its dims regrouped, each element on its rank."""
    local = x.local.reshape(layout.local_shape)
    strides = x.local.stride()
    if x.local.numel() == 0 or strides == _dense_strides(tuple(x.local.shape)):
        return x.perhaps_view(local, layout)
    expanded = tuple([d for d, n in enumerate(x.local.shape) if n > 1 and not strides[d]])
    if expanded and x.stored == () and not _is_view_of_expanded(x.shape, expanded, layout.shape):
        return x.in_rows(
            x.local.clone(memory_format=torch.contiguous_format).view_as(local), layout
        )
    order = tuple(dims_in_memory(strides)) if 0 not in strides and len(strides) == x.ndim else ()
    if _is_copied(x.shape, order, layout.shape) and _is_view(
        tuple(x.local.shape), strides, layout.local_shape
    ):  # a part of one row may be seen in another shape where the whole may not
        return x.perhaps_view(local.clone(), layout)
    # rows that lie apart in memory, as those of a slice of the whole do; on all ranks alike
    copied = not _is_view(_first_part(x.layout), strides, _first_part(layout))
    moved = copied and _is_view(x.shape, strides, layout.shape)
    return x.copy(local, layout, moved=moved or x.copied is not None)


@lru_cache(maxsize=4096)
def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


@lru_cache(maxsize=4096)
def _first_part(layout: Layout) -> tuple[int, ...]:
    """The shape of the first rank's part, which is the largest."""
    grid = Grid(layout.grid.sizes, (0,) * len(layout.grid.sizes))
    return layout_of(layout.dims, grid).local_shape


@lru_cache(maxsize=4096)
def _is_view(shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return True if torch gives a view of shape `target` of a tensor of these strides."""
    try:
        torch.empty_strided(shape, strides, device="meta").view(target)
    except (RuntimeError, ValueError):  # the latter while torch traces
        return False
    return True


@lru_cache(maxsize=4096)
def _is_view_of_expanded(
    shape: tuple[int, ...], expanded: tuple[int, ...], target: tuple[int, ...]
) -> bool:
    """Return True if torch gives a view of a tensor whose dims `expanded` repeat one row."""
    rows = [1 if d in expanded else n for d, n in enumerate(shape)]
    return _is_view(shape, torch.empty(rows, device="meta").expand(shape).stride(), target)


@lru_cache(maxsize=4096)
def _is_copied(shape: tuple[int, ...], order: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return True if torch copies to give `target` of a whole tensor in this order of dims."""
    if list(order) == sorted(order):
        return False
    stored = torch.empty([shape[d] for d in order], device="meta")
    whole = stored.permute([order.index(d) for d in range(len(shape))])
    return not _is_view(shape, whole.stride(), target)


def _regrouped(x: Subdomain, shape: tuple[int, ...]) -> Subdomain:
    if 0 in shape:  # no elements, on any rank
        return x.perhaps_view(x.local.reshape(shape), Layout.of(shape, {}, x.layout.grid))
    done = _alike(x.shape, shape)  # dims of `flat` already taken
    # dims that stay as they are at the end, too: to merge them would copy what lies transposed
    kept = max(min(_alike(x.shape[:done:-1], shape[:done:-1]), len(shape) - done - 1), 0)
    last = x.layout.dims[x.ndim - kept :]
    dims: list[Dim] = [*x.layout.dims[:done]]
    factors = merge([f for dim in x.layout.dims[done : x.ndim - kept] for f in dim])
    flat = x.view(x.local, layout_of((*dims, *((f,) for f in factors), *last), x.layout.grid))
    flat = _laid_out(flat, flat.layout)
    for extent in shape[done : len(shape) - kept]:
        start, need = done, extent
        while done < flat.ndim - kept and (
            need > 1 or (extent == flat.shape[done] == 1 and done == start)
        ):
            if need % flat.shape[done]:
                flat = _split_factor(flat, done, need)
            need //= flat.shape[done]
            done += 1
        dims.append(merge([f for dim in flat.layout.dims[start:done] for f in dim]))
    # split factors of extent 1
    rest = [f for dim in flat.layout.dims[done : flat.ndim - kept] for f in dim]
    if rest and dims:
        dims[-1] = merge([*dims[-1], *rest])
    elif rest:
        flat = whole(flat, 0)
    layout = layout_of((*dims, *last), x.layout.grid)
    return _laid_out(flat, layout)


def _alike(shape: Sequence[int], target: Sequence[int]) -> int:
    """Count the first dims that stay as they are."""
    pairs = enumerate(zip(shape, target, strict=False))
    return next((d for d, (n, m) in pairs if n != m), min(len(shape), len(target)))


def _split_factor(flat: Subdomain, dim: int, outer: int) -> Subdomain:
    """Split factor `dim` of extent N into (outer, N / outer), the outer one split as N was.

    Where `outer` does not divide N, as in (3, 4) to (2, 6), N is merged with the factor after it.
    """
    while flat.shape[dim] % outer:
        dims = [*flat.layout.dims]
        dims[dim : dim + 2] = [merge([*dims[dim], *dims[dim + 1]])]
        layout = layout_of(tuple(dims), flat.layout.grid)
        flat = one_factor(_laid_out(flat, layout), dim)
    ((factor,), grid) = flat.layout.dims[dim], flat.layout.grid
    inner = factor.extent // outer
    local, moved = flat.local, False
    if factor.axes:
        offsets = [inner * n for n in partition(outer, grid.parts(factor.axes))]
        needs = tuple(((low, high),) if high > low else () for low, high in pairwise(offsets))
        moved = route_of(flat, dim, needs).moves
        local = fetch(flat, dim, needs)
    dims = [*flat.layout.dims]
    dims[dim : dim + 1] = [(Factor(outer, factor.axes),), (Factor(inner),)]
    layout = layout_of(tuple(dims), grid)
    moved |= flat.copied is not None
    return flat.copy(local.reshape(layout.local_shape), layout, moved=moved)


@lru_cache(maxsize=4096)
def _resolved(shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    known = math.prod(n for n in target if n != -1)
    total = math.prod(shape)
    if -1 in target and known and total % known == 0:
        target = tuple(total // known if n == -1 else n for n in target)
    if math.prod(target) != total or -1 in target:
        raise RuntimeError(f"shape '{list(target)}' is invalid for input of shape {shape}")
    return target


@implements(torch.reshape, Tensor.reshape, Tensor.view, limits="no view of another dtype")
def reshape(func: Callable[..., Any], x: Subdomain, *shape: Any, **kwargs: Any) -> Subdomain:
    """Regroup dims; rows travel only where a split dim is cut elsewhere."""
    shape = shape or tuple(kwargs.values())
    if isinstance(shape[0], torch.dtype):
        raise UnsupportedOperationError("view of another dtype; use to(dtype)")
    return reshape_to(x, listed(shape))


@implements(Tensor.view_as, Tensor.reshape_as)
def reshape_as(func: Callable[..., Any], x: Subdomain | Tensor, other: Any) -> Subdomain | Tensor:
    """Regroup dims to the shape of another tensor; rows travel as for `reshape`."""
    if isinstance(x, Tensor):  # only the shape of a split one is needed
        return x.reshape(other.shape)
    return reshape_to(x, other.shape)


@implements(torch.flatten, Tensor.flatten, torch.ravel, Tensor.ravel)
def flatten(
    func: Callable[..., Any], x: Subdomain, start_dim: int = 0, end_dim: int = -1
) -> Subdomain:
    """Merge dims; nothing travels."""
    if func in (torch.ravel, Tensor.ravel):  # ravel copies a column, and flatten is a view of it
        x = convert(Tensor.contiguous, x)
    first, last = x.layout.dim(start_dim), x.layout.dim(end_dim)
    if first > last:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    if first == last and x.ndim and func in (torch.flatten, Tensor.flatten):
        return x  # the tensor itself, as in torch
    merged = merge([f for dim in x.layout.dims[first : last + 1] for f in dim])
    layout = layout_of((*x.layout.dims[:first], merged, *x.layout.dims[last + 1 :]), x.layout.grid)
    return _in_order(x, layout.shape, lambda part: _laid_out(part, layout))


@implements(torch.unflatten, Tensor.unflatten)
def unflatten(func: Callable[..., Any], x: Subdomain, dim: int, sizes: Sequence[int]) -> Subdomain:
    """Cut a dim into several; rows travel only where the ranks' parts are cut."""
    d = x.layout.dim(dim)
    return reshape_to(x, [*x.shape[:d], *_resolved((x.shape[d],), tuple(sizes)), *x.shape[d + 1 :]])


@implements(torch.unsqueeze, Tensor.unsqueeze)
def unsqueeze(func: Callable[..., Any], x: Subdomain, dim: int) -> Subdomain:
    """Add a dim of extent 1; nothing travels."""
    d = dim % (x.ndim + 1)
    dims = (*x.layout.dims[:d], (Factor(1),), *x.layout.dims[d:])
    return x.view(x.local.unsqueeze(d), layout_of(dims, x.layout.grid))


@implements(torch.squeeze, Tensor.squeeze)
def squeeze(func: Callable[..., Any], x: Subdomain, dim: Any = None) -> Any:
    """Remove dims of extent 1; the row of one that is split travels to all ranks."""
    asked = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d for d in map(x.layout.dim, asked) if x.shape[d] == 1}
    source = x
    for d in gone:
        x = whole(x, d)
    dims = tuple(factors for d, factors in enumerate(x.layout.dims) if d not in gone)
    return source.copy(
        x.local.squeeze(tuple(gone)), layout_of(dims, x.layout.grid), moved=x is not source
    )


_LEAST = {typed_torch.atleast_1d: 1, typed_torch.atleast_2d: 2, typed_torch.atleast_3d: 3}


@implements(*_LEAST)
def atleast(func: Callable[..., Any], *tensors: Any) -> Any:
    """New dims as torch adds them: (n) is (1, n) and (1, n, 1), (n, m) is (n, m, 1)."""
    x, least = next(iter(tensors)), _LEAST[func]
    if len(tensors) > 1 or isinstance(x, list | tuple):
        raise UnsupportedOperationError("several tensors at once; call it for each")
    if x.ndim < min(least, 2):
        x = unsqueeze(torch.unsqueeze, x, 0)
    return unsqueeze(torch.unsqueeze, x, 2) if x.ndim < least else x


@implements(torch.view_as_real)
def view_as_real(func: Callable[..., Any], x: Subdomain) -> Subdomain:
    """The pairs of real and imaginary parts are the last dim, which is whole."""
    return x.view(func(x.local), layout_of((*x.layout.dims, (Factor(2),)), x.layout.grid))


@implements(torch.view_as_complex)
def view_as_complex(func: Callable[..., Any], x: Subdomain) -> Subdomain:
    """Read pairs of numbers as complex ones; rows travel if the last dim is split."""
    local = whole(x, x.ndim - 1).local
    if not local.numel():  # torch leaves the strides of none, also where it makes them dense
        local = local.clone(memory_format=torch.contiguous_format)
    return x.perhaps_view(func(local), layout_of(x.layout.dims[:-1], x.layout.grid))


@implements(Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to)
def expand(func: Callable[..., Any], x: Any, *sizes: Any, **kwargs: Any) -> Subdomain:
    """Repeat dims of extent 1; the row of one that is split travels to all ranks."""
    sizes = sizes or tuple(kwargs.values())
    first = sizes[0]
    if isinstance(x, Tensor):  # like a split tensor
        return spread(x, common_layout([x, first]), first)
    sizes = first.shape if isinstance(first, Tensor | Subdomain) else sizes
    target = [int(n) for n in listed(sizes)]
    added = len(target) - x.ndim
    shape = (*[1] * added, *x.shape)
    target = [old if new == -1 else new for old, new in zip(shape, target, strict=True)]
    source = x
    for d in x.layout.split_dims:
        if x.shape[d] == 1 != target[added + d]:
            x = whole(x, d)
    dims = tuple(
        (Factor(new),) if d < added or new != shape[d] else x.layout.dims[d - added]
        for d, new in enumerate(target)
    )
    layout = layout_of(dims, x.layout.grid)
    return source.copy(x.local.expand(layout.local_shape), layout, moved=x is not source)
