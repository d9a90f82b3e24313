"""Picks elements and rows by an index tensor, along one dim or among all elements.

Where the dim is whole and operand and index are split alike, every rank has what its part of the
index names. Otherwise the numbers travel to the ranks that own what they name (lookup.py).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import subdomains
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch_by_index import rows_of
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.reduce.extreme import extreme
from lightning_shard.ops.registry import composes, implements
from lightning_shard.ops.view.aligned import (
    Operand,
    aligned_layout,
    as_split,
    as_table,
    dim_of,
    part_of_row,
    places_of,
)
from lightning_shard.ops.view.index import is_short, single, take_rows
from lightning_shard.ops.view.lookup import index_part, looked_up, rows_named


@implements(torch.index_select, Tensor.index_select)
def index_select(func: Callable[..., Any], x: Operand, dim: int, index: Operand) -> Operand:
    """Take rows by number; they travel to the ranks that name them."""
    d = dim_of(x, dim)
    x = as_split(x, index)
    if is_short(index):
        return take_rows(x, d, index.reshape(-1))
    index = index if index.ndim or isinstance(index, Subdomain) else index.reshape(1)
    return looked_up(x, d, [index], lambda value: IndexError("index out of range in self"))


@implements(torch.gather, Tensor.gather)
def gather(
    func: Callable[..., Any], x: Operand, dim: int, index: Operand, *, sparse_grad: bool = False
) -> Subdomain:
    """Take elements by their place along `dim`; they travel to the ranks that name them."""
    d = dim_of(x, dim, index)
    layout = aligned_layout(d, index.shape, [x, index])
    if layout is not None and not (isinstance(x, Subdomain) and x.layout.axes(d)):
        if isinstance(index, Subdomain):  # any of its rows may be here
            layout = layout.with_dims({d: index.layout.dims[d]})
        if len(set(layout.axes())) == len(layout.axes()):
            picked = torch.gather(part_of_row(x, layout, d), d, part_of_row(index, layout, d))
            return subdomains([x, index])[0].like(picked, layout)
    return _gathered(x, d, index)


def _gathered(x: Operand, d: int, index: Operand) -> Subdomain:
    """Each element is asked for by its flat number."""
    owner = subdomains([x, index])[0]
    splits = owner.layout
    if isinstance(index, Tensor):  # the result is split as the operand
        axes = {e: splits.axes(e) for e in splits.split_dims}
        layout = Layout.of(index.shape, axes, splits.grid)
        index = owner.like(part_of_row(index, layout, -1), layout)
    places = places_of(index.layout, index.local, d)
    extents = tuple(x.shape)

    def complaint(value: int, place: int) -> Exception:
        size = extents[d]
        return RuntimeError(f"index {value} is out of bounds for dimension {d} with size {size}")

    numbers, wrong = rows_of([p.reshape(-1) for p in places], extents, negative=False)
    found = rows_named(as_table(x, owner), numbers, wrong, complaint)
    return index.like(found.reshape(index.local.shape))


@composes(torch.take_along_dim, Tensor.take_along_dim)
def take_along_dim(
    func: Callable[..., Any], x: Tensor, indices: Tensor, dim: int | None = None
) -> Tensor:
    """Take elements along `dim` by broadcast indices; they travel as for `gather`."""
    if dim is None:
        x, indices, dim = x.flatten(), indices.flatten(), 0
    d = dim % x.ndim
    both = [max(a, b) if min(a, b) else 0 for a, b in zip(x.shape, indices.shape, strict=True)]
    x, rows = (
        t.expand([t.shape[i] if i == d else n for i, n in enumerate(both)]) for t in (x, indices)
    )
    return torch.gather(x, d, torch.where(rows < 0, rows + x.shape[d], rows))


@implements(torch.take, Tensor.take)
def take(func: Callable[..., Any], x: Operand, index: Operand) -> Operand:
    """Pick among all elements in their order."""
    table = as_table(x, subdomains([x, index])[0])
    count = table.shape[0]

    def complaint(value: int) -> Exception:
        return IndexError(
            f"out of range: tried to access index {value} on a tensor of {count} elements."
        )

    if index.ndim:
        return looked_up(table, 0, [index], complaint)
    assert isinstance(index, Tensor)
    return single(looked_up(table, 0, [index.reshape(1)], complaint), 0, 0).local


@implements(F.embedding, limits="no max_norm, no scale_grad_by_freq")
def embedding(
    func: Callable[..., Any],
    input: Operand,  # noqa: A002 - torch's name of the argument
    weight: Operand,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Operand:
    """Row numbers look up a table; the row of padding gets no gradient."""
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedOperationError("embedding with max_norm or scale_grad_by_freq")
    if isinstance(weight, Tensor) and isinstance(input, Subdomain):
        dims = (*input.layout.dims, (Factor(weight.shape[1]),))
        if input.local.numel() or sparse:
            found = func(input.local, weight, padding_idx, sparse=sparse)
        else:  # torch's second derivative of no rows raises an error
            found = empty_attached((*input.local.shape, weight.shape[1]), weight)
        return input.like(found, Layout(dims, input.layout.grid))
    table = as_split(weight, input)
    flat = input if input.ndim or isinstance(input, Subdomain) else input.reshape(1)
    rows = looked_up(table, 0, [flat], lambda value: IndexError("index out of range in self"))
    if padding_idx is not None:
        pad = padding_idx % table.shape[0]
        own = index_part(flat, Layout(rows.layout.dims[:-1], rows.layout.grid))
        rows = rows.like(torch.where((own == pad).unsqueeze(-1), rows.local.detach(), rows.local))
    if input.ndim:
        return rows
    row = single(rows, 0, 0)
    return row if row.layout.split_dims else row.local


@implements(F.one_hot)
def one_hot(func: Callable[..., Any], x: Subdomain, num_classes: int = -1) -> Subdomain:
    """Mark the class of each element; the largest one travels if no number of classes is given."""
    if num_classes < 0:
        largest = extreme(torch.amax, x)
        assert isinstance(largest, Tensor)
        num_classes = int(largest.item()) + 1
    dims = (*x.layout.dims, (Factor(num_classes),))
    if not x.local.numel():
        empty = x.local.new_zeros((*x.local.shape, num_classes))
        return x.like(empty, Layout(dims, x.layout.grid))
    return x.like(func(x.local, num_classes), Layout(dims, x.layout.grid))
