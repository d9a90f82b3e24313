"""Assignment by index: each rank writes the assigned rows that it owns."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import (
    one_factor,
    split_differently,
    subdomains,
    take_local,
    whole,
)
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import Span, fetch, needs_of
from lightning_shard.domain.layout import Factor, Layout, merge
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.become import BecameSplit, become_split
from lightning_shard.ops.registry import implements, rule_for
from lightning_shard.ops.view.aligned import as_split
from lightning_shard.ops.view.assign_chosen import assign_chosen, picks_of
from lightning_shard.ops.view.entries import covers, expanded_index
from lightning_shard.ops.view.index import getitem, range_of, row_of
from lightning_shard.ops.view.reshape import unsqueeze
from lightning_shard.processes.torch_private.internals import storage_key


@implements(Tensor.__setitem__, limits="no None among the indices")
def setitem(
    func: Callable[..., Any], x: Any, index: Any, value: Any
) -> BecameSplit | Tensor | None:
    """Each rank writes the assigned rows that it owns."""
    if not isinstance(x, Subdomain):
        return _written_to_plain(func, x, index, value)
    entries = expanded_index(x.ndim, index, lists=True)
    if None in entries:
        raise UnsupportedOperationError("assignment through an index with None")
    if any(isinstance(entry, Subdomain | Tensor) for entry in entries):
        return _assign_picked(func, x, entries, value)
    rows = [_rows(x, d, entry) for d, entry in enumerate(entries)]
    if isinstance(value, Subdomain | Tensor) and value.ndim:
        value = _with_dims(func, value, [isinstance(e, int) for e in entries])
    value = _split_as(x, value) if isinstance(value, Subdomain) else value
    place: list[slice | Tensor] = []
    for d, chosen in enumerate(rows):
        if not x.layout.axes(d):
            place.append(slice(chosen.start, chosen.stop, chosen.step))
            continue
        factors = merge(x.layout.dims[d])
        x = x.view(x.local, x.layout.with_dims({d: factors}), x.strides)
        value, where = (_owned if len(factors) == 1 else _owned_of_product)(x, d, chosen, value)
        place.append(where)
    if sum(isinstance(where, Tensor) for where in place) > 1:
        raise UnsupportedOperationError(
            "assignment to some rows of two split dims that were both made of several dims"
        )
    _write(x.local, tuple(place), value.local if isinstance(value, Subdomain) else value)
    return None


def _write(local: Tensor, place: tuple[slice | Tensor, ...], value: Any) -> None:
    """Assign; the old values stay in the graph, with a gradient of zeros.

    Where all of a tensor is written torch drops them. On a rank all of whose rows are written, of
    which others have more, the graph would lack the collectives of a second backward pass.

    Rows of the same memory are copied first. Of some, such as `x[i] = x[i]`, torch would say that
    they overlap with what is written, and only on ranks that have them.
    """
    if isinstance(value, Tensor) and storage_key(value) == storage_key(local):
        value = value.clone()
    extents = zip(place, local.shape, strict=True)
    covers_all = all(isinstance(w, slice) and len(range(n)[w]) == n for w, n in extents)
    nothing = local.flatten()[:0].sum() if covers_all and local.requires_grad else None
    local[place] = value
    if nothing is not None:
        local += nothing


def _assign_picked(
    func: Callable[..., Any], x: Subdomain, entries: Sequence[Any], value: Any
) -> None:
    """Write where tensors among the entries say; what slices choose is written back as a whole."""
    picks = picks_of(entries)
    if picks is not None:
        assign_chosen(x, picks, value)
        return
    basic: list[Any] = []
    inner: list[Any] = []
    for entry in entries:
        if isinstance(entry, Subdomain | Tensor):
            basic += [slice(None)] * covers(entry)
            inner.append(entry)
        else:
            basic.append(entry)
            inner += [] if isinstance(entry, int) else [slice(None)]
    part = getitem(func, x, tuple(basic))
    owner = part if isinstance(part, Subdomain) else as_split(part, x)
    part = owner.like(owner.local.clone())
    setitem(func, part, tuple(inner), value)
    setitem(func, x, tuple(basic), part if part.layout.split_dims else part.local)


def _written_to_plain(
    func: Callable[..., Any], x: Tensor, index: Any, value: Any
) -> BecameSplit | Tensor | None:
    """The plain tensor `x` becomes split; a complex one becomes a spectrum of assigned modes.

    It stays whole where a split index says which of its rows are written.
    """
    spectral = rule_for(func, lazy=True)
    if spectral is not None and x.is_complex() and isinstance(value, Subdomain):
        return spectral.run(func, x, index, value)
    return written_to_field(func, x, index, value)


def written_to_field(
    func: Callable[..., Any], x: Tensor, index: Any, value: Any
) -> BecameSplit | Tensor | None:
    """Write into the plain tensor `x` as into a field, also where it is complex."""
    masks = isinstance(index, Subdomain) and index.dtype == torch.bool
    if not masks and any(
        isinstance(entry, Subdomain | Tensor) for entry in expanded_index(x.ndim, index, lists=True)
    ):
        part = as_split(x, subdomains([index, value])[0])
        part = part.like(x.clone())
        setitem(func, part, index, value)
        x.copy_(part.local)
        return None
    target = subdomains([index, value])[0].like(x, layout_of_target(tuple(x.shape), index, value))
    return become_split(x, target, lambda part: setitem(func, part, index, value))


def layout_of_target(shape: tuple[int, ...], index: Any, value: Any) -> Layout:
    """Choose the split of a plain tensor of a shape that is to take split rows, or a split mask."""
    if isinstance(index, Subdomain):
        whole_dims = tuple((Factor(n),) for n in shape[index.ndim :])
        return Layout(index.layout.dims + whole_dims, index.layout.grid)
    kept = [d for d, e in enumerate(expanded_index(len(shape), index)) if isinstance(e, slice)]
    splits: dict[int, tuple[int, ...]] = {}
    for d in value.layout.split_dims if isinstance(value, Subdomain) else ():
        if value.shape[d] > 1 and value.ndim - d <= len(kept):
            splits[kept[d - value.ndim]] = value.layout.axes(d)
    return Layout.of(shape, splits, subdomains([index, value])[0].layout.grid)


def _rows(x: Subdomain, dim: int, entry: int | slice) -> range:
    if isinstance(entry, slice):
        return range_of(x.shape[dim], entry)
    row = row_of(x, dim, entry)
    return range(row, row + 1)


def _split_as(x: Subdomain, value: Subdomain) -> Subdomain:
    """`value` with dims that are split over the ranks of the same dims of `x`, or whole."""
    for d in value.layout.split_dims:
        target = d - value.ndim + x.ndim
        if value.shape[d] == 1:
            value = whole(value, d)
        elif target < 0 or x.layout.axes(target) != value.layout.axes(d):
            raise split_differently([x, value])
    return value


def _with_dims(func: Callable[..., Any], value: Any, single_rows: Sequence[bool]) -> Any:
    """`value` with a dim of extent 1 for each dim that is indexed by one row."""
    own = value.ndim
    for d in range(len(single_rows) - 1, -1, -1):
        if single_rows[d]:
            value = (
                unsqueeze(func, value, own)
                if isinstance(value, Subdomain)
                else value.unsqueeze(own)
            )
        elif own == 0:
            break
        else:
            own -= 1
    return value


def _owned_of_product(
    x: Subdomain, dim: int, rows: range, value: Any
) -> tuple[Any, slice | Tensor]:
    """Return `_owned` for a dim that several dims were flattened to.

    There a rank's rows lie apart.
    """
    factors, grid = x.layout.dims[dim], x.layout.grid
    own = dim - x.ndim if isinstance(value, Subdomain | Tensor) else 0
    given = bool(own) and value.ndim >= -own and (value.shape[own] > 1 or len(rows) == 1)
    if rows == range(x.shape[dim]):
        place: slice | Tensor = slice(None)
        mine = None
    else:
        held = take_local(torch.arange(x.shape[dim], device="cpu"), 0, factors, grid)
        chosen = (held >= rows.start) & (held < rows.stop) & ((held - rows.start) % rows.step == 0)
        place = chosen.nonzero().flatten().to(x.local.device)
        mine = (held[chosen] - rows.start) // rows.step
    if not given:
        return value, place
    d = value.ndim + own
    if isinstance(value, Subdomain):
        if mine is None and merge(value.layout.dims[d]) == factors:
            return value, place
        value = whole(value, d)
    local = value.local if isinstance(value, Subdomain) else value
    if mine is None:
        local = take_local(local, d, factors, grid)
    else:
        local = local.index_select(d, mine.to(local.device))
    return value.like(local) if isinstance(value, Subdomain) else local, place


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
        value = one_factor(value, d)
        local = fetch(value, d, needs_of(factor.extent, parts, positions))
        return value.like(local, value.layout.with_dim(d, len(rows), axes=())), where
    if isinstance(value, Subdomain):
        return value.like(value.local.narrow(d, first, last - first)), where
    return value.narrow(d, first, last - first), where
