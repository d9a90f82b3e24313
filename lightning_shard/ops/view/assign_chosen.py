"""Assignment to rows that masks and index tensors choose: values go to the rows' owners."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import common_layout, local_part, subdomains
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch_by_index import rows_of
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.masked_rows import Chosen, chosen_by
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.become import BecameSplit, become_split
from lightning_shard.ops.registry import implements, is_in_place
from lightning_shard.ops.view.aligned import (
    Operand,
    as_split,
    as_table,
    places_of,
    refuse_other_domains,
)
from lightning_shard.ops.view.entries import covers, is_mask
from lightning_shard.ops.view.index import brought_in_front, places_in, strided
from lightning_shard.ops.view.lookup import index_layout, index_part
from lightning_shard.ops.view.mask import covered, in_front
from lightning_shard.ops.view.write import Rows, Writing, written

Picks = Sequence[tuple[int, Operand]]


def picks_of(entries: Sequence[Any]) -> Picks | None:
    """Find the tensors among entries, each with its dim, if all others are whole slices."""
    picks: list[tuple[int, Operand]] = []
    d = 0
    for entry in entries:
        if isinstance(entry, Tensor | Subdomain):
            picks.append((d, entry))
        elif entry != slice(None):
            return None
        d += covers(entry)
    return picks


def assign_chosen(x: Subdomain, picks: Picks, value: Any, *, add: bool = False) -> None:
    """Write `value` into the rows of `x` that the tensors choose.

    Raises:
        RuntimeError: The value does not broadcast to what is chosen.
    """
    if any(d + covers(entry) < after for (d, entry), (after, _) in pairwise(picks)):
        x, picks = brought_in_front(x, picks)
    first, entry = picks[0]
    if len(picks) == 1 and is_mask(entry) and not add:
        _assign_masked(x, first, entry, value)
        return
    tensors = [t for _, e in picks for t in (places_in(e) if is_mask(e) else [e])]
    _assign_rows(x, first, tensors, value, add=add)


def _assign_masked(x: Subdomain, first: int, mask: Operand, value: Any) -> None:
    same, marks = covered(x, first, mask)
    if same.layout != x.layout:
        raise UnsupportedOperationError("a mask that is split otherwise than what it is written to")
    place = (slice(None),) * first + (marks.local,)
    if not (isinstance(value, Subdomain | Tensor) and value.ndim):
        one: Any = value
        x.local[place] = one
        return
    chosen = chosen_by(marks)
    layout = _target(x, first, ((chosen.factor,),), mask.ndim, value)
    rows = _rows_for(chosen, value, layout, first, x)
    x.local[place] = rows.movedim(0, first)


def _target(
    x: Subdomain, first: int, added: Sequence[tuple[Factor, ...]], count: int, value: Operand
) -> Layout:
    """The layout of what is chosen, to which the value must broadcast."""
    if value.dtype != x.dtype:
        names = [str(t.dtype).removeprefix("torch.") for t in (x, value)]
        raise RuntimeError(
            "Index put requires the source and destination dtypes match, got "
            f"{names[0]} for the destination and {names[1]} for the source."
        )
    dims = (*x.layout.dims[:first], *added, *x.layout.dims[first + count :])
    layout = Layout(dims, x.layout.grid)
    shape = tuple(value.shape)
    while len(shape) > layout.ndim and shape[0] == 1:
        shape = shape[1:]
    fits = len(shape) <= layout.ndim and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(layout.shape), strict=False)
    )
    if not fits:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to "
            f"indexing result of shape {list(layout.shape)}"
        )
    return layout


def _rows_for(chosen: Chosen, value: Operand, layout: Layout, first: int, x: Subdomain) -> Tensor:
    """The value's row for each place that this rank's part of the mask chooses."""
    local = local_part(value, layout) if isinstance(value, Subdomain) else value
    if isinstance(value, Tensor):  # whole on every rank, which takes what it needs
        apart = layout.with_dim(first, layout.shape[first], ())
        local = local_part(value, apart).expand(apart.local_shape)
        return local.movedim(first, 0).index_select(0, chosen.numbers.to(local.device))
    rows = local.expand(layout.local_shape).movedim(first, 0)
    return chosen.returned(rows, x.domain)


def _assign_rows(
    x: Subdomain, first: int, indices: Sequence[Operand], value: Any, *, add: bool
) -> None:
    refuse_other_domains(x, *indices, value)
    count = len(indices)
    dims = range(first, first + count)
    carried = [d for d in range(x.ndim) if d not in dims]
    index = Layout.of(torch.broadcast_shapes(*(i.shape for i in indices)), {}, x.layout.grid)
    if subdomains(indices):
        index = index_layout(x, dims, indices, x.layout.axes(*carried) if carried else ())
    many = isinstance(value, Subdomain | Tensor) and value.ndim > 0
    if many and isinstance(value, Subdomain):
        index = _like_value(index, first, value, x, carried)
    parts = [index_part(i, index).expand(index.local_shape).reshape(-1) for i in indices]
    extents = x.shape[first : first + count]
    numbers, wrong = rows_of([p.to(x.local.device) for p in parts], extents)
    rows = None
    if many:
        layout = _target(x, first, index.dims, count, value)
        rows = local_part(_cut_front(value, layout.ndim), layout).expand(layout.local_shape)
        rows = in_front(rows, first, index.ndim)
    table = Layout(
        (tuple(f for d in dims for f in x.layout.dims[d]), *(x.layout.dims[d] for d in carried)),
        x.layout.grid,
    )

    def run(target: Tensor, ids: Tensor, given: Tensor | None) -> Tensor:
        one = (
            torch.as_tensor(value, dtype=x.dtype, device=target.device) if given is None else given
        )
        return torch.index_put(target, (ids,), one, accumulate=add)

    def complaint(number: int, place: int) -> Exception:
        return IndexError(
            f"index {number} is out of bounds for dimension {first + place} with size "
            f"{extents[place]}"
        )

    order = None
    if rows is not None and not add:
        order = rows_of([p.reshape(-1) for p in places_of(index, numbers)], index.shape)[0]
    target = in_front(x.local, first, count).clone()
    found = written(
        x.like(target, table),
        Rows(numbers, wrong, rows, index.axes(), order),
        Writing(run, complaint, add),
    )
    back = [x.local.shape[d] for d in (*dims, *carried)]
    order_of_dims = [*dims, *carried]
    x.local.copy_(found.reshape(back).permute([order_of_dims.index(d) for d in range(x.ndim)]))


def _like_value(
    index: Layout, first: int, value: Subdomain, x: Subdomain, carried: Sequence[int]
) -> Layout:
    """The layout of an index that is whole becomes that of the split rows that are written."""
    taken = set(x.layout.axes(*carried)) if carried else set[int]()
    behind = len([d for d in carried if d >= first])
    for d in value.layout.split_dims:
        place = d - value.ndim + index.ndim + behind
        axes = set(value.layout.axes(d))
        free = 0 <= place < index.ndim and not index.axes(place) and value.shape[d] > 1
        if free and not axes & (taken | set(index.axes())):
            index = index.with_dims({place: value.layout.dims[d]})
    return index


def _cut_front(value: Any, ndim: int) -> Any:
    """Without leading dims of extent 1 that are too many."""
    while value.ndim > ndim:
        value = value[0] if isinstance(value, Tensor) else value.like(
            value.local.squeeze(0), Layout(value.layout.dims[1:], value.layout.grid)
        )  # fmt: skip
    return value


@implements(torch.index_put, Tensor.index_put, Tensor.index_put_, torch.index_put_)
def index_put(
    func: Callable[..., Any],
    x: Operand,
    indices: Sequence[Any],
    values: Any,
    accumulate: bool = False,
) -> Any:
    """Write or add values where the index tensors say."""
    entries = [slice(None) if i is None else i for i in indices]
    picks = picks_of(entries)
    assert picks is not None
    owner = subdomains([x, indices, values])[0]
    if is_in_place(func) and isinstance(x, Subdomain):
        assign_chosen(x, picks, values, add=accumulate)
        return x
    target = as_split(x, owner)
    target = target.like(target.local.clone())
    assign_chosen(target, picks, values, add=accumulate)
    if isinstance(x, Subdomain):
        return target
    return x.copy_(target.local) if is_in_place(func) else target.local


@implements(torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_)
def masked_scatter(
    func: Callable[..., Any], x: Operand, mask: Operand, source: Operand
) -> Subdomain | BecameSplit | Tensor:
    """Where the mask is true the elements of `source`, in order."""
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_scatter needs a mask of booleans; got {mask.dtype}")
    owner = subdomains([x, mask, source])[0]
    both = [as_split(o, owner) for o in (x, mask)]
    layout = common_layout(both)
    if is_in_place(func) and not (isinstance(x, Subdomain) and x.layout == layout):
        if isinstance(x, Tensor) and layout.split_dims:
            return become_split(
                x, owner.like(x, layout), lambda part: masked_scatter(func, part, mask, source)
            )
        if isinstance(x, Subdomain):
            raise UnsupportedOperationError("a mask that is split otherwise than its target")
    own, marks = (local_part(o, layout).expand(layout.local_shape) for o in both)
    chosen = chosen_by(owner.like(marks, layout))
    count = chosen.factor.extent
    flat = as_table(source, owner)
    if flat.shape[0] < count:
        raise RuntimeError("Number of elements of source < number of ones in mask")
    if isinstance(source, Tensor):
        rows = flat.local.index_select(0, chosen.numbers)
    else:
        first = strided(flat, 0, range(count))
        rows = local_part(first, Layout(((chosen.factor,),), layout.grid))
        rows = chosen.returned(rows, owner.domain)
    found = own.reshape(-1).index_put((chosen.places,), rows).reshape(layout.local_shape)
    if is_in_place(func):
        local = x.local if isinstance(x, Subdomain) else x
        local.copy_(found)
        return x
    return owner.like(found, layout) if layout.split_dims else found
