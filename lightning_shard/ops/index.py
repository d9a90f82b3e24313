"""Rows chosen by position: slices, single rows, shifts, mirrored and padded rows, assignment."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain import Subdomain
from lightning_shard.halo import Span, fetch, needs_of, route
from lightning_shard.layout import Factor, Layout
from lightning_shard.ops.align import simple, take_local, whole
from lightning_shard.ops.registry import UnsupportedOperationError, implements
from lightning_shard.ops.view import unsqueeze


def strided(x: Subdomain, dim: int, rows: range) -> Subdomain:
    """The rows `rows` (ascending) of `dim`."""
    if not x.layout.axes(dim):
        local = x.local[(slice(None),) * dim + (slice(rows.start, rows.stop, rows.step),)]
        return x.view(local, x.layout.with_dim(dim, len(rows)))
    x = simple(x, dim)
    if rows == range(x.shape[dim]):
        return x
    layout = x.layout.with_dim(dim, len(rows))
    (factor,) = layout.dims[dim]
    grid = layout.grid

    def span(low: int, high: int) -> list[Span]:
        return [(rows[low], rows[high - 1] + 1)]

    needs = needs_of(len(rows), grid.parts(factor.axes), span)
    moved = route(x.shape[dim], grid.index(factor.axes), needs).moves
    local = fetch(x, dim, needs)[(slice(None),) * dim + (slice(None, None, rows.step),)]
    return Subdomain(local, layout, x.domain, x.moved or moved)


def single(x: Subdomain, dim: int, row: int) -> Subdomain:
    """Row `row` of `dim`, on every rank, without the dim."""
    local, moved = x.local, x.moved
    if x.layout.axes(dim):
        x = simple(x, dim)
        parts = x.layout.grid.parts(x.layout.axes(dim))
        local, row, moved = fetch(x, dim, (((row, row + 1),),) * parts), 0, parts > 1 or moved
    dims = x.layout.dims[:dim] + x.layout.dims[dim + 1 :]
    return Subdomain(local.select(dim, row), Layout(dims, x.layout.grid), x.domain, moved)


def chosen_rows(x: Subdomain, dim: int, extent: int, row_of: Callable[[int], int]) -> Subdomain:
    """Output row `o` of `extent` is input row `row_of(o)`; runs of consecutive rows travel together."""
    x = simple(x, dim)
    layout = x.layout.with_dim(dim, extent)

    def spans(low: int, high: int) -> list[Span]:
        rows = [row_of(o) for o in range(low, high)]
        cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(rows)) if b != a + 1), len(rows)]
        return [(rows[i], rows[j - 1] + 1) for i, j in pairwise(cuts)]

    needs = needs_of(extent, layout.grid.parts(layout.axes(dim)), spans)
    return x.like(fetch(x, dim, needs), layout)


@implements(Tensor.__getitem__)
def getitem(func: Callable[..., Any], x: Any, index: Any) -> Any:
    if not isinstance(x, Subdomain):
        raise UnsupportedOperationError("indexing a plain tensor with a split one")
    d = 0
    for entry in expanded_index(x.ndim, index):
        if entry is None:
            x = unsqueeze(func, x, d)
            d += 1
        elif isinstance(entry, int):
            x = single(x, d, _row(x, d, entry))
        else:
            x = strided(x, d, _range(x.shape[d], entry))
            d += 1
    return x if x.layout.split_dims else x.local


def expanded_index(ndim: int, index: Any) -> list[Any]:
    """One entry (int, slice or None) for each of `ndim` dims; the ellipsis written out."""
    index = list(index) if isinstance(index, tuple) else [index]
    index = [int(i) if isinstance(i, Tensor) and i.ndim == 0 and not i.dtype.is_floating_point
             and i.dtype != torch.bool else i for i in index]  # fmt: skip
    if any(not isinstance(i, int | slice | None | type(...)) or isinstance(i, bool) for i in index):
        raise UnsupportedOperationError("indexing with tensors, lists or masks")
    missing = ndim - sum(i is not None and i is not ... for i in index)
    if missing < 0:
        raise IndexError(f"too many indices for tensor of dimension {ndim}")
    where = index.index(...) if ... in index else len(index)
    return index[:where] + [slice(None)] * missing + index[where + 1 :]


def _range(extent: int, entry: slice) -> range:
    if entry.step is not None and entry.step < 1:
        raise ValueError("step must be greater than zero")
    return range(extent)[entry]


def _row(x: Subdomain, dim: int, row: int) -> int:
    if not -x.shape[dim] <= row < x.shape[dim]:
        raise IndexError(f"index {row} is out of bounds for dimension {dim} with size {x.shape[dim]}")
    return row % x.shape[dim]


@implements(torch.select, Tensor.select)
def select(func: Callable[..., Any], x: Subdomain, dim: int, index: int) -> Any:
    d = x.layout.dim(dim)
    return getitem(func, x, (slice(None),) * d + (int(index),))


@implements(torch.narrow, Tensor.narrow)
def narrow(func: Callable[..., Any], x: Subdomain, dim: int, start: int, length: int) -> Any:
    d = x.layout.dim(dim)
    start = _row(x, d, int(start)) if length else 0
    if start + length > x.shape[d]:
        raise RuntimeError(
            f"start ({start}) + length ({length}) exceeds dimension size ({x.shape[d]})."
        )
    return strided(x, d, range(start, start + length))


@implements(torch.split, Tensor.split)
def split(
    func: Callable[..., Any], x: Subdomain, split_size_or_sections: Any, dim: int = 0
) -> tuple[Subdomain, ...]:
    d, sizes = x.layout.dim(dim), split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[d] - start) for start in range(0, x.shape[d], sizes)]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    if not ends or ends[-1] != x.shape[d]:
        raise RuntimeError(f"split sizes {sizes} do not add up to {x.shape[d]} (dim {dim})")
    return tuple(strided(x, d, range(e - n, e)) for n, e in zip(sizes, ends, strict=True))


@implements(torch.chunk, Tensor.chunk)
def chunk(func: Callable[..., Any], x: Subdomain, chunks: int, dim: int = 0) -> tuple[Subdomain, ...]:
    return split(func, x, max(-(-x.shape[x.layout.dim(dim)] // chunks), 1), dim)


@implements(torch.unbind, Tensor.unbind, Tensor.__iter__)
def unbind(func: Callable[..., Any], x: Subdomain, dim: int = 0) -> Any:
    d = x.layout.dim(dim)
    rows = tuple(getitem(func, x, (slice(None),) * d + (i,)) for i in range(x.shape[d]))
    return iter(rows) if func is Tensor.__iter__ else rows


@implements(torch.roll, Tensor.roll)
def roll(func: Callable[..., Any], x: Subdomain, shifts: Any, dims: Any = None) -> Subdomain:
    if dims is None or dims == ():
        raise UnsupportedOperationError("roll of the flattened tensor; name the dims")
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    for shift, dim in zip(shifts, map(x.layout.dim, dims), strict=True):
        if x.layout.axes(dim):
            n = x.shape[dim]
            x = chosen_rows(x, dim, n, lambda o, n=n, shift=shift: (o - shift) % n)
        else:
            x = x.like(x.local.roll(shift, dim))
    return x


@implements(torch.flip, Tensor.flip)
def flip(func: Callable[..., Any], x: Subdomain, *dims: Any) -> Subdomain:
    for dim in map(x.layout.dim, dims[0] if isinstance(dims[0], Sequence) else dims):
        n, axes = x.shape[dim], x.layout.axes(dim)
        local = x.local
        if axes:
            x = simple(x, dim)
            needs = needs_of(n, x.layout.grid.parts(axes), lambda low, high, n=n: [(n - high, n - low)])
            local = fetch(x, dim, needs)
        x = x.like(local.flip(dim))
    return x


@implements(F.pad, torch._C._nn.pad)
def pad(
    func: Callable[..., Any],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Subdomain:
    """Whole dims are padded locally, split ones row by row of the padded output."""
    x, inner = input, [0] * len(pad)
    for i in range(len(pad) // 2):
        dim, before, after = x.ndim - 1 - i, pad[2 * i], pad[2 * i + 1]
        if not x.layout.axes(dim):
            inner[2 * i : 2 * i + 2] = before, after
        elif before or after:
            x = _pad_split(x, dim, before, after, mode, value)
    local = F.pad(x.local, inner, mode, value) if any(inner) else x.local
    layout = x.layout
    for i in range(len(pad) // 2):
        if any(inner[2 * i : 2 * i + 2]):
            dim = x.ndim - 1 - i
            layout = layout.with_dim(dim, x.shape[dim] + sum(inner[2 * i : 2 * i + 2]))
    return x.like(local, layout)


def _pad_split(
    x: Subdomain, dim: int, before: int, after: int, mode: str, value: float | None
) -> Subdomain:
    n = x.shape[dim]
    extent = n + before + after
    if mode != "constant":
        limit = {"reflect": n - 1, "circular": n, "replicate": max(before, after)}[mode]
        if max(before, after) > limit:
            raise RuntimeError(f"{mode} padding ({before}, {after}) is too large for size {n}")
        period = max(2 * (n - 1), 1)
        source = {
            "reflect": lambda o: n - 1 - abs(n - 1 - (o - before) % period),
            "replicate": lambda o: min(max(o - before, 0), n - 1),
            "circular": lambda o: (o - before) % n,
        }[mode]
        return chosen_rows(x, dim, extent, source)
    x = simple(x, dim)
    layout = x.layout.with_dim(dim, extent)
    low, high = layout.dims[dim][0].bounds(layout.grid)

    def inside(low: int, high: int) -> list[Span]:
        first, last = max(low - before, 0), min(high - before, n)
        return [(first, last)] if first < last else []

    rows = fetch(x, dim, needs_of(extent, layout.grid.parts(layout.axes(dim)), inside))
    missing = high - low - rows.shape[dim]
    head = min(max(before - low, 0), missing)
    local = F.pad(rows, [0, 0] * (x.ndim - dim - 1) + [head, missing - head], value=value)
    return x.like(local, layout)


@implements(Tensor.__setitem__)
def setitem(func: Callable[..., Any], x: Any, index: Any, value: Any) -> None:
    """Each rank writes the assigned rows that it owns."""
    if not isinstance(x, Subdomain):
        raise UnsupportedOperationError(
            "a plain tensor, whole on every rank, cannot take split rows; make it like the split tensor "
            "(torch.zeros_like, new_zeros)"
        )
    entries = expanded_index(x.ndim, index)
    if None in entries:
        raise UnsupportedOperationError("assignment through an index with None")
    rows = [range(_row(x, d, e), _row(x, d, e) + 1) if isinstance(e, int) else _range(x.shape[d], e)
            for d, e in enumerate(entries)]  # fmt: skip
    if isinstance(value, Subdomain | Tensor) and value.ndim:
        value = _with_dims(func, value, [isinstance(e, int) for e in entries])
    place: list[slice] = []
    for d, chosen in enumerate(rows):
        if not x.layout.axes(d):
            place.append(slice(chosen.start, chosen.stop, chosen.step))
            continue
        x = simple(x, d)
        value, where = _owned(x, d, chosen, value)
        place.append(where)
    x.local[tuple(place)] = value.local if isinstance(value, Subdomain) else value


def _with_dims(func: Callable[..., Any], value: Any, single_rows: Sequence[bool]) -> Any:
    """`value` with a dim of extent 1 for each dim that is indexed by one row."""
    own = value.ndim
    for d in range(len(single_rows) - 1, -1, -1):
        if single_rows[d]:
            value = unsqueeze(func, value, own) if isinstance(value, Subdomain) else value.unsqueeze(own)
        elif own == 0:
            break
        else:
            own -= 1
    return value


def _owned(x: Subdomain, dim: int, rows: range, value: Any) -> tuple[Any, slice]:
    """The part of `value` that goes to this rank's rows among `rows`, and their local places."""
    ((factor,), grid) = x.layout.dims[dim], x.layout.grid
    parts = grid.parts(factor.axes)

    def positions(low: int, high: int) -> list[Span]:
        first = -(-max(low - rows.start, 0) // rows.step)
        last = min(-(-max(high - rows.start, 0) // rows.step), len(rows))
        return [(first, last)] if first < last else []

    low, high = factor.bounds(grid)
    mine = positions(low, high) if high > low else []
    first, last = mine[0] if mine else (0, 0)
    where = slice(0, 0)
    if mine:
        where = slice(rows[first] - low, rows[last - 1] - low + 1, rows.step)
    own = dim - x.ndim if isinstance(value, Subdomain | Tensor) else 0
    if not own or value.ndim < -own or value.shape[own] == 1 != len(rows):
        return value, where
    d = value.ndim + own
    if isinstance(value, Subdomain) and value.layout.axes(d):
        value = simple(value, d)
        if value.layout.axes(d) != factor.axes:
            raise UnsupportedOperationError(f"assignment of rows split as {value.layout}")
        local = fetch(value, d, needs_of(factor.extent, parts, positions))
        return value.like(local, value.layout.with_dim(d, len(rows), axes=())), where
    if isinstance(value, Subdomain):
        return value.like(value.local.narrow(d, first, last - first)), where
    return value.narrow(d, first, last - first), where
