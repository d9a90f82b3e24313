"""Rows that a mask chooses, and where they are: counted once, then moved to where they belong.

The result is an ordinary split tensor of M rows, split canonically, for which every rule holds; see
domain/masked_rows.py. Ranks whose rows are not chosen get rows of others.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import common_layout, local_part, subdomains
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.masked_rows import Chosen, chosen_by, flat_places
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements
from lightning_shard.ops.view.aligned import Operand
from lightning_shard.ops.view.reshape import unsqueeze


def masked_rows(x: Operand, first: int, mask: Operand) -> Subdomain:
    """`x` with the dims that `mask` covers, from `first` on, replaced by one of the chosen rows.

    Raises:
        IndexError: The mask has other extents than these dims.
    """
    x, mask = covered(x, first, mask)
    chosen = chosen_by(mask)
    rows = in_front(x.local, first, mask.ndim)
    local = chosen.moved(rows, x.domain).movedim(0, first)
    local = local.contiguous() if x.local.is_contiguous() else local
    dims = (*x.layout.dims[:first], (chosen.factor,), *x.layout.dims[first + mask.ndim :])
    return x.in_any_order(local, Layout(dims, x.layout.grid))


def covered(x: Operand, first: int, mask: Operand) -> tuple[Subdomain, Subdomain]:
    """Return the tensor, and a mask of its dims from `first` on, split alike."""
    for d, n in enumerate(mask.shape):
        if n != x.shape[first + d]:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {d} does not match the shape "
                f"of the indexed tensor {list(x.shape)} at index {first + d}"
            )
    owner = subdomains([x, mask])[0]
    spread = mask
    for _ in range(x.ndim - first - mask.ndim):
        spread = added_at_end(spread)
    layout = common_layout([x, spread])
    own = Layout(layout.dims[first : first + mask.ndim], layout.grid)
    return owner.like(local_part(x, layout), layout), owner.like(local_part(mask, own), own)


def added_at_end(x: Operand) -> Operand:
    """`x` with one more dim, of extent 1."""
    return (
        unsqueeze(torch.unsqueeze, x, x.ndim) if isinstance(x, Subdomain) else x.unsqueeze(x.ndim)
    )


def in_front(local: Tensor, first: int, count: int) -> Tensor:
    """Return the tensor with `count` dims from `first` on as one dim, which is the first."""
    order = [*range(first, first + count), *range(first), *range(first + count, local.ndim)]
    moved = local.permute(order)
    return moved.reshape(math.prod(moved.shape[:count]), *moved.shape[count:])


@implements(torch.masked_select, Tensor.masked_select)
def masked_select(func: Callable[..., Any], x: Operand, mask: Operand) -> Subdomain:
    """The elements of one dim, in order."""
    layout = common_layout([x, mask])
    owner = subdomains([x, mask])[0]
    local, marks = (local_part(o, layout).expand(layout.local_shape) for o in (x, mask))
    chosen = chosen_by(owner.like(marks, layout))
    found = chosen.moved(local.reshape(-1), owner.domain)
    return owner.like(found, Layout(((chosen.factor,),), layout.grid))


@implements(torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
def nonzero(func: Callable[..., Any], x: Subdomain, *, as_tuple: bool = False) -> Any:
    """The places (M, dims) of what is not zero; as a tuple one tensor (M) for each dim."""
    chosen, numbers = _places(x)
    found: list[Tensor] = []
    for extent in reversed(x.shape):
        found.append(numbers % extent)
        numbers = numbers // extent
    rows = Layout(((chosen.factor,),), x.layout.grid)
    if as_tuple:
        return tuple(x.like(column, rows) for column in reversed(found))
    layout = Layout((*rows.dims, (Factor(x.ndim),)), x.layout.grid)
    columns = torch.stack(found[::-1]).t()  # torch's lie one after the other, too
    return Subdomain(columns, layout, x.domain, None, (1, layout.shape[0]))


def _places(x: Subdomain) -> tuple[Chosen, Tensor]:
    """Choose what is not zero, with each element's flat global place, on its new owner."""
    chosen = chosen_by(x.like(x.local.detach() != 0))
    flat = flat_places(x.layout, x.shape, x.local.device).reshape(-1)
    return chosen, chosen.moved(flat, x.domain)
