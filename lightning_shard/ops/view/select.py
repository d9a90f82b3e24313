"""Picks or writes elements by an index tensor along one dim.

The other dims of operand and index are taken alike, so every rank has what its part of the index
names if the dim that is indexed is whole. A plain index also picks from a split one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import simple, split_differently, subdomains, take_local
from lightning_shard.domain.empty_ranks import concatenated
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import scatter_sum
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.become import Became, become_split
from lightning_shard.ops.reduce.extreme import extreme
from lightning_shard.ops.registry import composes, implements, is_in_place, name_of
from lightning_shard.ops.view.index import take_rows

Operand = Subdomain | Tensor


@implements(torch.index_select, Tensor.index_select, limits="the index must be plain")
def index_select(func: Callable[..., Any], x: Operand, dim: int, index: Operand) -> Subdomain:
    if isinstance(x, Tensor) or isinstance(index, Subdomain):
        raise UnsupportedOperationError(
            "index_select with a split index; use indexing or embedding"
        )
    return take_rows(x, x.layout.dim(dim), index.reshape(-1))


@implements(torch.gather, Tensor.gather, limits="a split index must not index a split dim")
def gather(
    func: Callable[..., Any], x: Operand, dim: int, index: Operand, *, sparse_grad: bool = False
) -> Subdomain:
    d = dim % x.ndim
    if isinstance(x, Subdomain) and x.layout.axes(d) and not isinstance(index, Subdomain):
        return _gather_from_ranks(x, d, index)
    _whole(d, x)
    layout = _layout(d, index.shape, x, index)
    picked = torch.gather(_part(x, layout, d), d, _part(index, layout, d))
    if isinstance(index, Subdomain):  # any of its rows may be here
        layout = _checked(layout.with_dims({d: index.layout.dims[d]}), x, index)
    return subdomains([x, index])[0].like(picked, layout)


@composes(
    torch.take_along_dim, Tensor.take_along_dim, limits="split indices must not index a split dim"
)
def take_along_dim(
    func: Callable[..., Any], x: Tensor, indices: Tensor, dim: int | None = None
) -> Tensor:
    if dim is None:
        raise UnsupportedOperationError("take_along_dim of the flattened tensor; name the dim")
    d = dim % x.ndim
    both = [max(a, b) if min(a, b) else 0 for a, b in zip(x.shape, indices.shape, strict=True)]
    x, rows = (
        t.expand([t.shape[i] if i == d else n for i, n in enumerate(both)]) for t in (x, indices)
    )
    return torch.gather(x, d, torch.where(rows < 0, rows + x.shape[d], rows))


@implements(torch.scatter, Tensor.scatter, Tensor.scatter_, torch.scatter_add,
            Tensor.scatter_add, Tensor.scatter_add_, torch.scatter_reduce,
            Tensor.scatter_reduce, Tensor.scatter_reduce_,
            limits="the dim that is indexed must be whole")  # fmt: skip
def scatter(
    func: Callable[..., Any], x: Operand, dim: int, index: Operand, *args: Any, **kwargs: Any
) -> Subdomain | Became:
    """Write `source`; along split dims it and the index must extend as far as the operand."""
    source = args[0] if args else kwargs.pop("src" if "src" in kwargs else "value")
    d = dim % x.ndim
    operands = [o for o in (x, index, source) if isinstance(o, Subdomain | Tensor) and o.ndim]
    _whole(d, *operands)
    layout = _layout(d, x.shape, *operands)
    in_place = is_in_place(func)
    if in_place and isinstance(x, Tensor):
        part = subdomains(operands)[0].like(x, layout)
        return become_split(
            x, part, lambda part: scatter(func, part, d, index, source, *args[1:], **kwargs)
        )
    if in_place and not (isinstance(x, Subdomain) and x.layout == layout):
        raise UnsupportedOperationError(
            "an in-place scatter into a tensor that is not split as its index is"
        )
    written = source if len(operands) < 3 else _part(source, layout, d)
    result = func(_part(x, layout, d), d, _part(index, layout, d), written, *args[1:], **kwargs)
    return subdomains(operands)[0].like(result, layout)


@implements(torch.index_add, Tensor.index_add, Tensor.index_add_, torch.index_copy,
            Tensor.index_copy, Tensor.index_copy_, torch.index_fill, Tensor.index_fill,
            Tensor.index_fill_,
            limits="the dim that is indexed must be whole")  # fmt: skip
def write_rows(
    func: Callable[..., Any], x: Operand, dim: int, index: Tensor, source: Any, **kwargs: Any
) -> Subdomain:
    if not isinstance(x, Subdomain) or isinstance(index, Subdomain):
        raise UnsupportedOperationError(
            f"{name_of(func)} into a plain tensor, or with a split index"
        )
    d = x.layout.dim(dim)
    operands = [o for o in (x, source) if isinstance(o, Subdomain | Tensor) and o.ndim]
    _whole(d, *operands)
    layout = _layout(d, x.shape, *operands)
    if layout != x.layout:
        raise UnsupportedOperationError(f"{name_of(func)} of rows that are split otherwise")
    rows = _part(source, layout, d) if len(operands) > 1 else source
    return x.like(func(x.local, d, index, rows, **kwargs))


@implements(F.embedding, limits="the table must be plain; no max_norm, no scale_grad_by_freq")
def embedding(
    func: Callable[..., Any],
    input: Operand,  # noqa: A002 - torch's name of the argument
    weight: Operand,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Subdomain:
    """Split row numbers look up a plain table."""
    if isinstance(weight, Subdomain) or not isinstance(input, Subdomain):
        raise UnsupportedOperationError("embedding with a split table")
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedOperationError("embedding with max_norm or scale_grad_by_freq")
    dims = (*input.layout.dims, (Factor(weight.shape[1]),))
    found = func(input.local, weight, padding_idx, sparse=sparse)
    return input.like(found, Layout(dims, input.layout.grid))


@implements(F.one_hot)
def one_hot(func: Callable[..., Any], x: Subdomain, num_classes: int = -1) -> Subdomain:
    if num_classes < 0:
        largest = extreme(torch.amax, x)
        assert isinstance(largest, Tensor)
        num_classes = int(largest.item()) + 1
    dims = (*x.layout.dims, (Factor(num_classes),))
    if not x.local.numel():
        empty = x.local.new_zeros((*x.local.shape, num_classes))
        return x.like(empty, Layout(dims, x.layout.grid))
    return x.like(func(x.local, num_classes), Layout(dims, x.layout.grid))


def _gather_from_ranks(x: Subdomain, dim: int, index: Tensor) -> Subdomain:
    """Each rank picks what it holds and zero for the rest; the sum is split along `dim` again."""
    extent = x.shape[dim]
    if bool(((index < 0) | (index >= extent)).any()):
        raise IndexError(f"gather: index out of bounds for dim {dim} with size {extent}")
    x = simple(x, dim)
    layout = _layout(dim, index.shape, x, index)
    (factor,) = x.layout.dims[dim]
    low, high = factor.bounds(x.layout.grid)
    zero = x.local.new_zeros([1 if d == dim else n for d, n in enumerate(x.local.shape)])
    rows = concatenated([x.local, zero], dim)
    index = _part(index, layout, dim)
    here = (index >= low) & (index < high)
    picked = torch.gather(rows, dim, torch.where(here, index - low, high - low))
    return scatter_sum(x.like(picked, layout), dim, x.layout.axes(dim))


def _layout(dim: int, shape: Sequence[int], *operands: Operand) -> Layout:
    """The layout of a result of `shape`: every dim but `dim` split where any operand is.

    Along such dims all operands must have the same rows.
    """
    owner = subdomains(operands)[0]
    if any(o.ndim != len(shape) for o in operands):
        raise UnsupportedOperationError("operand and index of different numbers of dims")
    layout = Layout.of(shape, {}, owner.layout.grid)
    for d in (d for d in range(len(shape)) if d != dim):
        split = [o for o in subdomains(operands) if o.layout.axes(d)]
        alike = all(o.shape[d] == shape[d] for o in operands)
        if split and not (
            alike and all(o.layout.dims[d] == split[0].layout.dims[d] for o in split)
        ):
            raise UnsupportedOperationError(
                f"operand and index must be split alike along dim {d}, with the same extent; the "
                f"shapes are {[tuple(o.shape) for o in operands]}"
            )
        layout = layout.with_dims({d: split[0].layout.dims[d]}) if split else layout
    return _checked(layout, *operands)


def _checked(layout: Layout, *operands: Operand) -> Layout:
    """`layout`, of which each mesh axis must split one dim only."""
    if len(set(layout.axes())) < len(layout.axes()):
        raise split_differently(operands)
    return layout


def _whole(dim: int, *operands: Operand) -> None:
    if any(o.layout.axes(dim) for o in subdomains(operands)):
        raise UnsupportedOperationError(f"an index tensor along the split dim {dim}")


def _part(x: Operand, layout: Layout, dim: int) -> Tensor:
    """This rank's part of `x` along all dims but `dim`."""
    local = x.local if isinstance(x, Subdomain) else x
    for d in layout.split_dims:
        if d != dim and not (isinstance(x, Subdomain) and x.layout.axes(d)):
            local = take_local(local, d, layout.dims[d], layout.grid)
    return local
