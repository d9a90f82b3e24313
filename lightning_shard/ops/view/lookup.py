"""Rows that index tensors name, split or plain, of a table that is split or plain.

Row numbers travel to the ranks that own the rows, and the rows come back; the gradient goes the
other way, and the owners add it up. Where more rows are named than the table has, the table is
gathered instead. Along dims that are whole nothing travels.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_shard.domain.align import common_layout, local_part, subdomains, whole
from lightning_shard.domain.fetch_by_index import (
    Complaint,
    named_rows,
    refuse_out_of_range,
    rows_of,
)
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.transfer import transferred
from lightning_shard.ops.view.aligned import Operand, refuse_other_domains
from lightning_shard.ops.view.mask import in_front


def looked_up(
    x: Subdomain,
    first: int,
    indices: Sequence[Operand],
    error: Callable[[int], Exception] | None = None,
) -> Subdomain:
    """`x` with the dims from `first` on replaced by those of the indices, one index for each dim.

    Args:
        x: The table, split or whole.
        first: The first of the dims that are indexed.
        indices: Split or plain, broadcast together; numbers may be counted from the end.
        error: The error of a number that is out of range, where that is not torch's error of
            `x[index]`.

    Raises:
        IndexError: A number is out of range on some rank; raised on all of them.
    """
    refuse_other_domains(x, *indices)
    count = len(indices)
    dims = range(first, first + count)
    carried = [d for d in range(x.ndim) if d not in dims]
    index = index_layout(x, dims, indices, x.layout.axes(*carried) if carried else ())
    parts = [index_part(i, index).expand(index.local_shape).to(x.local.device) for i in indices]
    if x.layout.axes(*dims):
        table = Layout(
            (
                tuple(f for d in dims for f in x.layout.dims[d]),
                *(x.layout.dims[d] for d in carried),
            ),
            x.layout.grid,
        )
        extents = x.shape[first : first + count]

        def complaint(value: int, place: int) -> Exception:
            return (
                error(value)
                if error
                else IndexError(
                    f"index {value} is out of bounds for dimension {first + place} with size "
                    f"{extents[place]}"
                )
            )

        rows = rows_named(
            x.like(in_front(x.local, first, count), table),
            *rows_of([p.reshape(-1) for p in parts], extents),
            complaint,
        )
        rows = rows.reshape(*index.local_shape, *rows.shape[1:])
        order = [*range(index.ndim, index.ndim + first), *range(index.ndim)]
        local = rows.permute(*order, *range(index.ndim + first, rows.ndim))
        local = local.contiguous() if x.local.is_contiguous() else local
    else:
        local = x.local[(slice(None),) * first + tuple(parts)]
    layout = (*x.layout.dims[:first], *index.dims, *x.layout.dims[first + count :])
    return x.chosen(local, Layout(layout, x.layout.grid))


def rows_named(table: Subdomain, numbers: Tensor, wrong: Tensor, complaint: Complaint) -> Tensor:
    """Bring the rows of the table's first dim that this rank names.

    Args:
        table: The tensor in which rows are looked up.
        numbers: Numbers of the rows.
        wrong: The number out of range that `rows_of` found.
        complaint: Makes torch's error for that.
    """
    if not table.layout.axes(0):
        refuse_out_of_range(table.domain, wrong, complaint)
        return table.local.index_select(0, numbers)
    named = named_rows(numbers, table.layout, table.domain, wrong, complaint)
    row = math.prod(table.shape[1:]) * table.dtype.itemsize
    if named.sends_less_whole(row):
        return whole(table, 0).local.index_select(0, numbers)
    requests = named.requests()
    return transferred(table.local, requests.lookup, requests.group)


def index_layout(
    x: Subdomain, dims: Sequence[int], indices: Sequence[Operand], taken: tuple[int, ...]
) -> Layout:
    """Choose the split of the broadcast indices.

    They stay split as they are, but for mesh axes that are `taken` by dims that are carried along.
    Whole indices of split dims are split along their largest dim, as the result is.
    """
    grid = x.layout.grid
    split = subdomains(indices)
    if split:
        layout = common_layout(indices)
        for d in layout.split_dims:
            if set(layout.axes(d)) & set(taken):
                layout = layout.with_dim(d, layout.shape[d], ())
        return layout
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    axes = x.layout.axes(*dims) if dims else ()
    largest = max(range(len(shape)), key=lambda d: shape[d])
    return Layout.of(shape, {largest: axes}, grid)


def index_part(index: Operand, layout: Layout) -> Tensor:
    """Return this rank's part of an index in a layout; it may be whole where the index is split."""
    if isinstance(index, Subdomain):
        for d in index.layout.split_dims:
            if not layout.axes(layout.ndim - index.ndim + d):
                index = whole(index, d)
    return local_part(index, layout)
