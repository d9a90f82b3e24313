"""Chooses rows by position: slices, single rows, lists of rows, and rows that a function names."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import simple
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import Span, fetch, needs_of, route_of
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements
from lightning_shard.ops.view.reshape import unsqueeze
from lightning_shard.processes.typed import integers, typed_torch


def strided(x: Subdomain, dim: int, rows: range) -> Subdomain:
    """Take the rows `rows` of `dim`, which ascend."""
    if not x.layout.axes(dim):
        local = x.local[(slice(None),) * dim + (slice(rows.start, rows.stop, rows.step),)]
        return x.view(local, x.layout.with_dim(dim, len(rows)))
    if rows == range(x.shape[dim]):
        return x
    x = simple(x, dim)
    layout = x.layout.with_dim(dim, len(rows))
    (factor,) = layout.dims[dim]
    grid = layout.grid

    def span(low: int, high: int) -> list[Span]:
        return [(rows[low], rows[high - 1] + 1)]

    needs = needs_of(len(rows), grid.parts(factor.axes), span)
    moved = route_of(x, dim, needs).moves
    local = fetch(x, dim, needs)[(slice(None),) * dim + (slice(None, None, rows.step),)]
    return Subdomain(local, layout, x.domain, x.moved or moved)


def single(x: Subdomain, dim: int, row: int) -> Subdomain:
    """Take row `row` of `dim` to every rank; the dim itself goes."""
    local, moved = x.local, x.moved
    if x.layout.axes(dim):
        x = simple(x, dim)
        parts = x.layout.grid.parts(x.layout.axes(dim))
        local, row, moved = fetch(x, dim, (((row, row + 1),),) * parts), 0, parts > 1 or moved
    dims = x.layout.dims[:dim] + x.layout.dims[dim + 1 :]
    return Subdomain(local.select(dim, row), Layout(dims, x.layout.grid), x.domain, moved)


def chosen_rows(x: Subdomain, dim: int, extent: int, row_of: Callable[[int], int]) -> Subdomain:
    """Output row `o` of `extent` is input row `row_of(o)`; runs of rows travel together."""
    x = simple(x, dim)
    layout = x.layout.with_dim(dim, extent)

    def spans(low: int, high: int) -> list[Span]:
        rows = [row_of(o) for o in range(low, high)]
        cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(rows)) if b != a + 1), len(rows)]
        return [(rows[i], rows[j - 1] + 1) for i, j in pairwise(cuts)]

    needs = needs_of(extent, layout.grid.parts(layout.axes(dim)), spans)
    return x.like(fetch(x, dim, needs), layout)


def take_rows(x: Subdomain, dim: int, index: Tensor) -> Subdomain:
    """The rows of `dim` that a plain list of them names, in its order."""
    rows = [row_of(x, dim, row) for row in integers(index)]
    if x.layout.axes(dim):
        return chosen_rows(x, dim, len(rows), rows.__getitem__)
    local = x.local.index_select(dim, torch.tensor(rows, dtype=torch.long, device=x.local.device))
    return x.like(local, x.layout.with_dim(dim, len(rows)))


@implements(Tensor.__getitem__, limits="no split masks; index tensors for one dim, if it is split")
def getitem(func: Callable[..., Any], x: Any, index: Any) -> Any:
    """Index by slices, numbers and None dim by dim, then by lists on dims that lie side by side."""
    if not isinstance(x, Subdomain):
        return _rows_of_table(x, index)
    d = 0
    lists: list[tuple[int, Tensor]] = []
    for entry in expanded_index(x.ndim, index, lists=True):
        if entry is None:
            x = unsqueeze(func, x, d)
        elif isinstance(entry, int):
            x = single(x, d, row_of(x, d, entry))
            continue
        elif isinstance(entry, Tensor):
            lists.append((d, entry))
        else:
            x = strided(x, d, range_of(x.shape[d], entry))
        d += 1
    x = _picked(x, lists) if lists else x
    return x if x.layout.split_dims else x.local


def _picked(x: Subdomain, lists: Sequence[tuple[int, Tensor]]) -> Subdomain:
    first, count = lists[0][0], len(lists)
    if count == 1 and lists[0][1].ndim == 1:
        return take_rows(x, *lists[0])
    if x.layout.axes(*range(first, first + count)):
        raise UnsupportedOperationError(
            "indexing a split dim with several tensors, or one of several dims"
        )
    tensors = typed_torch.broadcast_tensors(*(index for _, index in lists))
    local = x.local[(slice(None),) * first + tensors]
    added = tuple((Factor(n),) for n in tensors[0].shape)
    dims = x.layout.dims[:first] + added + x.layout.dims[first + count :]
    return x.like(local, Layout(dims, x.layout.grid))


def _rows_of_table(table: Tensor, index: Any) -> Subdomain:
    """Rows of a plain tensor by a split tensor of row numbers."""
    if not isinstance(index, Subdomain) or index.dtype == torch.bool:
        raise UnsupportedOperationError(
            "indexing a plain tensor with a split mask, or with several split tensors; mask with "
            "torch.where(mask, x, value) instead, which keeps the shape"
        )
    added = tuple((Factor(n),) for n in table.shape[1:])
    return index.like(table[index.local], Layout(index.layout.dims + added, index.layout.grid))


def expanded_index(ndim: int, index: Any, *, lists: bool = False) -> list[Any]:
    """One entry for each of `ndim` dims (and None for new ones); the ellipsis written out.

    Entries are ints and slices; with `lists` also plain tensors of row numbers, to which lists and
    masks are turned.
    """
    if isinstance(index, list) and any(isinstance(i, slice | None | type(...)) for i in index):
        index = tuple(index)
    entries = [_entry(i, lists=lists) for i in (index if isinstance(index, tuple) else (index,))]
    index = [e for group in entries for e in group]
    tensors = [n for n, i in enumerate(index) if isinstance(i, Tensor)]
    places = [n for n, i in enumerate(index) if isinstance(i, Tensor | int)]
    if tensors and places[-1] - places[0] >= len(places):
        raise UnsupportedOperationError(
            "an index of tensors and numbers with slices between them, which moves their dims to "
            "the front"
        )
    missing = ndim - sum(i is not None and i is not ... for i in index)
    if missing < 0:
        raise IndexError(f"too many indices for tensor of dimension {ndim}")
    where = next((n for n, i in enumerate(index) if i is ...), len(index))
    return index[:where] + [slice(None)] * missing + index[where + 1 :]


def _entry(entry: Any, *, lists: bool) -> list[Any]:
    """The entry in its simplest form; a mask of several dims gives one tensor for each."""
    if isinstance(entry, int | slice | None | type(...)) and not isinstance(entry, bool):
        return [entry]
    if isinstance(entry, Tensor) and entry.ndim == 0 and not entry.is_floating_point():
        if entry.dtype != torch.bool:
            return [int(entry)]
    elif lists and isinstance(entry, list) and all(isinstance(i, int | bool) for i in entry):
        return _entry(torch.tensor(entry), lists=True)
    elif lists and isinstance(entry, Tensor) and entry.dtype == torch.bool:
        return list(entry.nonzero(as_tuple=True))
    elif lists and isinstance(entry, Tensor) and not entry.is_floating_point():
        return [entry]
    raise UnsupportedOperationError(
        "indexing with a split tensor or mask: how many elements it picks is not known before; "
        "mask with torch.where(mask, x, value) instead, which keeps the shape"
        if isinstance(entry, Subdomain)
        else "indexing with tensors, lists or masks of this kind"
    )


def range_of(extent: int, entry: slice) -> range:
    if entry.step is not None and entry.step < 1:
        raise ValueError("step must be greater than zero")
    return range(extent)[entry]


def row_of(x: Subdomain, dim: int, row: int) -> int:
    if not -x.shape[dim] <= row < x.shape[dim]:
        raise IndexError(
            f"index {row} is out of bounds for dimension {dim} with size {x.shape[dim]}"
        )
    return row % x.shape[dim]


@implements(torch.select, Tensor.select)
def select(func: Callable[..., Any], x: Subdomain, dim: int, index: int) -> Any:
    d = x.layout.dim(dim)
    return getitem(func, x, (slice(None),) * d + (int(index),))


@implements(torch.narrow, Tensor.narrow, torch.narrow_copy, Tensor.narrow_copy)
def narrow(func: Callable[..., Any], x: Subdomain, dim: int, start: int, length: int) -> Any:
    d = x.layout.dim(dim)
    start = row_of(x, d, int(start)) if length else 0
    if start + length > x.shape[d]:
        raise RuntimeError(
            f"start ({start}) + length ({length}) exceeds dimension size ({x.shape[d]})."
        )
    return strided(x, d, range(start, start + length))
