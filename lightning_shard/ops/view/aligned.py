"""Operands of functions with an index: split alike or not, and where their elements lie."""

from collections.abc import Sequence

from torch import Tensor

from lightning_shard.domain.align import (
    local_part,
    split_differently,
    split_moved,
    subdomains,
    take_local,
    whole,
)
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.masked_rows import global_rows
from lightning_shard.domain.subdomain import Subdomain

Operand = Subdomain | Tensor


def dim_of(x: Operand, dim: int, index: Operand | None = None) -> int:
    """`dim` counted from the front, of a tensor with dims; the index, if given, has as many."""
    if not x.ndim or (index is not None and index.ndim != x.ndim):
        raise UnsupportedOperationError("an operand and an index of different numbers of dims")
    return dim % x.ndim


def refuse_other_domains(*operands: object) -> None:
    """Raise where operands are split over the ranks of several meshes."""
    split = subdomains(list(operands))
    if any(s.domain is not split[0].domain for s in split):
        raise split_differently(split)


def aligned_layout(dim: int, shape: Sequence[int], operands: Sequence[Operand]) -> Layout | None:
    """Find the layout of a result of `shape`: each dim but `dim` split where any operand is.

    None where the operands do not have the same rows along such dims.
    """
    refuse_other_domains(*operands)
    split = subdomains(operands)
    if any(o.ndim != len(shape) for o in operands):
        return None
    layout = Layout.of(shape, {}, split[0].layout.grid)
    for d in (d for d in range(len(shape)) if d != dim):
        of_dim = [o.layout.dims[d] for o in split if o.layout.axes(d)]
        if not of_dim:
            continue
        if any(o.shape[d] != shape[d] for o in operands) or len(set(of_dim)) > 1:
            return None
        layout = layout.with_dims({d: of_dim[0]})
    return layout if len(set(layout.axes())) == len(layout.axes()) else None


def part_of_row(x: Operand, layout: Layout, dim: int) -> Tensor:
    """Return this rank's part of `x` along all dims but `dim`."""
    local = x.local if isinstance(x, Subdomain) else x
    for d in layout.split_dims:
        if d != dim and not (isinstance(x, Subdomain) and x.layout.axes(d)):
            local = take_local(local, d, layout.dims[d], layout.grid)
    return local


def as_split(x: Operand, owner: Operand) -> Subdomain:
    """`x`, or a plain tensor as one of whole dims on the ranks of `owner`."""
    if isinstance(x, Subdomain):
        return x
    assert isinstance(owner, Subdomain)
    return owner.like(x, Layout.of(x.shape, {}, owner.layout.grid))


def as_table(x: Operand, owner: Subdomain) -> Subdomain:
    """Lay out all elements of `x`, in their order, as rows of one dim."""
    x = as_split(x, owner)
    factors = tuple(f for dim in x.layout.dims for f in dim) or (Factor(1),)
    return x.like(x.local.reshape(-1), Layout((factors,), x.layout.grid))


def places_of(layout: Layout, local: Tensor, dim: int | None = None) -> list[Tensor]:
    """Give this rank's global rows in each dim, as index tensors.

    Along `dim` they are the index `local`.
    """
    found: list[Tensor] = []
    for e, factors in enumerate(layout.dims):
        rows = global_rows(factors, layout.grid, local.device)
        shape = [-1 if i == e else 1 for i in range(layout.ndim)]
        own = local if e == dim else rows.view(shape)
        found.append(own.expand(layout.local_shape))
    return found


def brought(x: Operand, layout: Layout) -> Tensor:
    """Bring this rank's part of `x` in a layout of its shape, however it is split now."""
    if not isinstance(x, Subdomain):
        return local_part(x, layout)
    for e in x.layout.split_dims:
        axes = x.layout.axes(e)
        if layout.axes(e) == axes:
            continue
        other = next((f for f in layout.split_dims if layout.axes(f) == axes), None)
        if other is None or x.layout.axes(other):
            x = whole(x, e)
        else:
            x = split_moved(x, e, other, layout.dims[other])
    return local_part(x, layout)
