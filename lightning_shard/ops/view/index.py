"""Chooses rows by position: slices, single rows, lists of rows, and rows that a function names."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_shard.domain.align import in_own_memory, one_factor, subdomains
from lightning_shard.domain.fetch import Span, fetch, fetch_alike, needs_of, route_of
from lightning_shard.domain.layout import layout_of
from lightning_shard.domain.strides import Strides, are_dense
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements
from lightning_shard.ops.view.aligned import Operand, as_split
from lightning_shard.ops.view.entries import covers, expanded_index, is_mask
from lightning_shard.ops.view.lookup import looked_up
from lightning_shard.ops.view.mask import masked_rows, nonzero
from lightning_shard.ops.view.permute import permuted
from lightning_shard.ops.view.reshape import unsqueeze
from lightning_shard.processes.torch_private.internals import views_replayed
from lightning_shard.processes.torch_private.typed import integers

_ALL = slice(None)
SHORT = 4096  # a plain list of so many rows is read by every rank


def strided(x: Subdomain, dim: int, rows: range) -> Subdomain:
    """Take the rows `rows` of `dim`, which ascend."""
    if not x.layout.axes(dim):
        local = x.local[(slice(None),) * dim + (slice(rows.start, rows.stop, rows.step),)]
        return x.view(local, x.layout.with_dim(dim, len(rows)), _strides_of_rows(x, dim, rows))
    if rows == range(x.shape[dim]):
        return x.alias()
    strides = _strides_of_rows(x, dim, rows)
    x = one_factor(x, dim)
    layout = x.layout.with_dim(dim, len(rows))
    (factor,) = layout.dims[dim]
    grid = layout.grid

    def span(low: int, high: int) -> list[Span]:
        return [(rows[low], rows[high - 1] + 1)]

    needs = needs_of(len(rows), grid.parts(factor.axes), span)
    moved = route_of(x, dim, needs).moves
    with views_replayed(layout.leaves_empty):  # see domain/empty_ranks.py
        local = fetch(x, dim, needs)
        if rows.step > 1:
            local = local[(slice(None),) * dim + (slice(None, None, rows.step),)]
    index = (slice(None),) * dim + (slice(rows.start, rows.stop, rows.step),)
    return x.copy(local, layout, strides, moved=moved, index=index)


def _strides_of_rows(x: Subdomain, dim: int, rows: range) -> Strides | None:
    if x.strides is None or rows.step == 1:
        return x.strides
    return tuple([n * rows.step if d == dim else n for d, n in enumerate(x.strides)])


def single(x: Subdomain, dim: int, row: int) -> Subdomain:
    """Take row `row` of `dim` to every rank; the dim itself goes."""
    local, place, moved = x.local, row, False
    dims = x.layout.dims[:dim] + x.layout.dims[dim + 1 :]
    layout = layout_of(dims, x.layout.grid)
    strides = None if x.strides is None else x.strides[:dim] + x.strides[dim + 1 :]
    if x.layout.axes(dim):
        x = one_factor(x, dim)
        parts = x.layout.grid.parts(x.layout.axes(dim))
        local, place, moved = fetch_alike(x, dim, (row, row + 1)), 0, parts > 1
        if moved and strides is not None and not are_dense(layout.shape, strides):
            local = torch.cat([local, local], dim)  # a view of a row lies apart, as in torch
    picked, index = local.select(dim, place), (slice(None),) * dim + (row,)
    return x.copy(picked, layout, strides, moved=moved, index=index)


def chosen_rows(x: Subdomain, dim: int, extent: int, row_of: Callable[[int], int]) -> Subdomain:
    """Copy input row `row_of(o)` to output row `o` of `extent`; runs of rows travel together."""
    given, x = x, one_factor(x, dim)
    layout = x.layout.with_dim(dim, extent)

    def spans(low: int, high: int) -> list[Span]:
        rows = [row_of(o) for o in range(low, high)]
        cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(rows)) if b != a + 1), len(rows)]
        return [(rows[i], rows[j - 1] + 1) for i, j in pairwise(cuts)]

    needs = needs_of(extent, layout.grid.parts(layout.axes(dim)), spans)
    return in_own_memory(x.chosen(fetch(x, dim, needs), layout), given)


def take_rows(x: Subdomain, dim: int, index: Tensor) -> Subdomain:
    """Bring the rows of `dim` that a plain list of them names, in its order."""
    rows = [row_of(x, dim, row) for row in integers(index)]
    if x.layout.axes(dim):
        return chosen_rows(x, dim, len(rows), rows.__getitem__)
    local = x.local.index_select(dim, torch.tensor(rows, dtype=torch.long, device=x.local.device))
    return x.chosen(local, x.layout.with_dim(dim, len(rows)))


@implements(Tensor.__getitem__, limits="no mask without dims")
def getitem(func: Callable[..., Any], x: Any, index: Any) -> Any:
    """Index by slices, numbers and None dim by dim, then by what tensors and masks choose."""
    if not isinstance(x, Subdomain):  # a table that every rank has
        x = as_split(x, subdomains(index)[0])
    d = 0
    picks: list[tuple[int, Operand]] = []
    given = x
    for entry in expanded_index(x.ndim, index, lists=True):
        if isinstance(entry, slice) and entry == _ALL:
            d += 1
            continue
        if entry is None:
            x = unsqueeze(func, x, d)
        elif isinstance(entry, int):
            x = single(x, d, row_of(x, d, entry))
            continue
        elif isinstance(entry, Tensor | Subdomain):
            picks.append((d, entry))
        else:
            x = strided(x, d, range_of(x.shape[d], entry))
        d += max(covers(entry), 1)
    if any(d + covers(entry) < after for (d, entry), (after, _) in pairwise(picks)):
        x, picks = brought_in_front(x, picks)
    x = _picked(x, picks) if picks else x
    x = x.alias() if x is given else x
    return x if x.layout.split_dims or x.copied else x.local


def brought_in_front(
    x: Subdomain, picks: Sequence[tuple[int, Operand]]
) -> tuple[Subdomain, list[tuple[int, Operand]]]:
    """Move the dims for which tensors stand to the front, as torch does if slices part them."""
    order: list[int] = []
    moved: list[tuple[int, Operand]] = []
    for d, entry in picks:
        moved.append((len(order), entry))
        order += range(d, d + covers(entry))
    return permuted(x, [*order, *(d for d in range(x.ndim) if d not in order)]), moved


def _picked(x: Subdomain, picks: Sequence[tuple[int, Operand]]) -> Subdomain:
    """Index dims that lie side by side with tensors and masks."""
    first, entry = picks[0]
    if len(picks) == 1 and is_mask(entry):
        if not is_short(entry):
            return masked_rows(x, first, entry)
    elif len(picks) == 1 and is_short(entry):
        return take_rows(x, first, entry)
    tensors: list[Operand] = []
    for _, entry in picks:
        tensors += places_in(entry) if is_mask(entry) else [entry]
    if len(tensors) == 1 and is_short(tensors[0]):
        return take_rows(x, first, tensors[0])
    return looked_up(x, first, tensors)


def places_in(mask: Operand) -> Sequence[Operand]:
    """Return the places where a mask is true, one index tensor for each dim."""
    if isinstance(mask, Subdomain):
        return nonzero(torch.nonzero, mask, as_tuple=True)
    return mask.nonzero(as_tuple=True)


def is_short(index: Operand) -> TypeGuard[Tensor]:
    """Return True if every rank can read the index and see from it which rows travel."""
    return isinstance(index, Tensor) and index.ndim == 1 and index.numel() <= SHORT


def range_of(extent: int, entry: slice) -> range:
    """Return the rows of a slice.

    Raises:
        ValueError: The step is not positive, as in torch.
    """
    if entry.step is not None and entry.step < 1:
        raise ValueError("step must be greater than zero")
    return range(extent)[entry]


def row_of(x: Subdomain, dim: int, row: int) -> int:
    """Return a row counted from the front.

    Raises:
        IndexError: There is no such row, in torch's words.
    """
    if not -x.shape[dim] <= row < x.shape[dim]:
        raise IndexError(
            f"index {row} is out of bounds for dimension {dim} with size {x.shape[dim]}"
        )
    return row % x.shape[dim]


@implements(torch.select, Tensor.select)
def select(func: Callable[..., Any], x: Subdomain, dim: int, index: int) -> Any:
    """Take one row; it travels to all ranks if `dim` is split."""
    d = x.layout.dim(dim)
    return getitem(func, x, (slice(None),) * d + (int(index),))


@implements(torch.narrow, Tensor.narrow, torch.narrow_copy, Tensor.narrow_copy)
def narrow(func: Callable[..., Any], x: Subdomain, dim: int, start: int, length: int) -> Any:
    """Take neighbouring rows; they travel to their places in the shorter dim if it is split."""
    d = x.layout.dim(dim)
    start = row_of(x, d, int(start)) if length else 0
    if start + length > x.shape[d]:
        raise RuntimeError(
            f"start ({start}) + length ({length}) exceeds dimension size ({x.shape[d]})."
        )
    rows = strided(x, d, range(start, start + length))
    copies = func in (torch.narrow_copy, Tensor.narrow_copy)
    return rows.in_rows(rows.local.clone(memory_format=torch.contiguous_format)) if copies else rows
