"""Reshapes: factors are regrouped, data stays.

Merging dims always keeps every element where it is: the merged dim remembers its factors.
Splitting a split dim of N rows into (n, N / n) moves rows between neighbours only where the
partition of N rows is not that of n times N / n. A reshape that cuts across dims, as (3, 4) to
(2, 6), moves rows to the canonical partition of their product.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import common_layout, one_factor, spread, whole
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import fetch, route_of
from lightning_shard.domain.layout import Dim, Factor, Layout, layout_of, merge, partition
from lightning_shard.domain.strides import are_dense, joins_split
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.elementwise.pointwise import convert
from lightning_shard.ops.registry import implements, listed
from lightning_shard.processes.torch_private.internals import storage_key
from lightning_shard.processes.torch_private.typed import typed_torch


def reshape_to(x: Subdomain, shape: Sequence[int]) -> Subdomain:
    """Regroup the factors of `x` into dims of `shape` (one entry may be -1)."""
    shape = _resolved(x.shape, tuple(map(int, shape)))
    if shape == x.shape:
        return x.alias()
    layout = _kept.get((x.layout, shape))
    if layout is None:
        flat = _regrouped(x, shape)
        layout = flat.layout
        if flat.copied or not shape:
            return _as_in_torch(x, flat.local, layout, moved=flat.copied is not None)
        if len(_kept) >= _LIMIT:
            _kept.clear()
        _kept[x.layout, shape] = layout
    # one step may give a view where several do not
    return _as_in_torch(x, x.local.reshape(layout.local_shape), layout)


_LIMIT = 4096
_kept: dict[tuple[Layout, tuple[int, ...]], Layout] = {}  # reshapes for which no row moves


def _as_in_torch(x: Subdomain, local: Tensor, layout: Layout, *, moved: bool = False) -> Subdomain:
    """Wrap the rows of `x` in other dims, as the view or the copy that torch gives of the whole.

    Where nobody knows which of them torch gives, and where the parts are no views of parts, the
    result is read only.

    Args:
        x: The tensor.
        local: The rows of the result.
        layout: The layout of the result.
        moved: True if they are a copy here, on all ranks alike.
    """
    if x.strides == x.layout.strides and not (moved or x.copied) and x.local.is_contiguous():
        return x.view(local, layout, layout.strides)
    strides = x.strides_of("view", layout.shape)
    is_own = storage_key(local) != storage_key(x.local)
    if x.strides is not None and strides is None:
        rows = torch.contiguous_format
        copied = local.contiguous() if is_own else local.clone(memory_format=rows)
        return x.in_rows(copied, layout)
    is_view = x.strides is not None or _without_ones(x.shape) == _without_ones(layout.shape)
    if not is_view:
        moved = True
    elif x.strides is not None and not are_dense(x.shape, x.strides):
        moved |= joins_split(x.layout, x.strides, layout.shape)
    moved |= x.copied is not None or (is_own and local.numel() > 0)
    return x.copy(local, layout, strides, moved=moved, is_view=is_view)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([n for n in shape if n != 1])


def _regrouped(x: Subdomain, shape: tuple[int, ...]) -> Subdomain:
    """The rows of `x` in dims of `shape`; as a copy if any travelled."""
    if 0 in shape:  # no elements, on any rank
        layout = Layout.of(shape, {}, x.layout.grid)
        return Subdomain(x.local.reshape(shape), layout, x.domain)
    done = _alike(x.shape, shape)  # dims of `flat` already taken
    # dims that stay as they are at the end, too: to merge them would copy what lies transposed
    kept = max(min(_alike(x.shape[:done:-1], shape[:done:-1]), len(shape) - done - 1), 0)
    last = x.layout.dims[x.ndim - kept :]
    dims: list[Dim] = [*x.layout.dims[:done]]
    factors = merge([f for dim in x.layout.dims[done : x.ndim - kept] for f in dim])
    flat = Subdomain(x.local, x.layout, x.domain)
    flat = _laid_out(flat, (*dims, *((f,) for f in factors), *last))
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
        row = whole(flat, 0)
        flat = flat.copy(row.local, row.layout, None)
    return _laid_out(flat, (*dims, *last))


def _laid_out(flat: Subdomain, dims: Sequence[Dim]) -> Subdomain:
    """The same rows, each on its rank, with their dims regrouped."""
    layout = layout_of(tuple(dims), flat.layout.grid)
    return flat.view(flat.local.reshape(layout.local_shape), layout, None)


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
        flat = one_factor(_laid_out(flat, dims), dim)
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
    return flat.copy(local.reshape(layout.local_shape), layout, None, moved=moved)


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
    return _as_in_torch(x, x.local.reshape(layout.local_shape), layout)


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
    strides = x.strides_of("unsqueeze", d)
    return x.view(x.local.unsqueeze(d), layout_of(dims, x.layout.grid), strides)


@implements(torch.squeeze, Tensor.squeeze)
def squeeze(func: Callable[..., Any], x: Subdomain, dim: Any = None) -> Any:
    """Remove dims of extent 1; the row of one that is split travels to all ranks."""
    asked = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d for d in map(x.layout.dim, asked) if x.shape[d] == 1}
    source, strides = x, x.strides_of("squeeze", tuple(gone))
    for d in gone:
        x = whole(x, d)
    dims = tuple(factors for d, factors in enumerate(x.layout.dims) if d not in gone)
    layout = layout_of(dims, x.layout.grid)
    return source.copy(x.local.squeeze(tuple(gone)), layout, strides, moved=x is not source)


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
    layout = layout_of((*x.layout.dims, (Factor(2),)), x.layout.grid)
    strides = None if x.strides is None else (*(2 * step for step in x.strides), 1)
    local = func(x.local)
    if not local.numel() and local.requires_grad:  # torch refuses an expanded gradient of no pairs
        local.register_hook(lambda grad: grad.clone(memory_format=torch.contiguous_format))
    return x.view(local, layout, strides)


@implements(torch.view_as_complex)
def view_as_complex(func: Callable[..., Any], x: Subdomain) -> Subdomain:
    """Read pairs of numbers as complex ones; rows travel if the last dim is split."""
    local = whole(x, x.ndim - 1).local
    if not local.numel():  # torch leaves the strides of none, also where it makes them dense
        local = local.clone(memory_format=torch.contiguous_format)
    layout = layout_of(x.layout.dims[:-1], x.layout.grid)
    strides = None if x.strides is None else tuple([step // 2 for step in x.strides[:-1]])
    moved = x.copied is not None or bool(x.layout.axes(x.ndim - 1))
    return x.copy(func(local), layout, strides, moved=moved)


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
    strides = source.strides_of("expand", layout.shape)
    return source.copy(x.local.expand(layout.local_shape), layout, strides, moved=x is not source)
