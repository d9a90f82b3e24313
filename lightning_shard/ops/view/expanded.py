"""Finds the row numbers of an index that was expanded to elements: `i[:, None].expand_as(x)`.

Then one number travels for a row, and not one for each element.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import all_gather_small, subdomains
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.view.aligned import Operand


def row_numbers_of(x: Operand, dim: int, index: Operand, source: Any) -> Operand | None:
    """Return the number of each row along `dim`, if the index has one for all elements of a row.

    The ranks agree on it, since a rank without rows cannot tell.
    """
    if not isinstance(source, Subdomain | Tensor):
        return None
    others = [d for d in range(x.ndim) if d != dim]
    if not others or tuple(index.shape) != tuple(source.shape):
        return None
    if any(x.shape[d] != index.shape[d] for d in others) or 0 in index.shape:
        return None
    split = subdomains([x, index, source])
    if any(s.layout.axes(d) for s in split for d in others):
        return None
    local = index.local if isinstance(index, Subdomain) else index
    alike = all(local.stride(d) == 0 or local.shape[d] == 1 for d in others)
    vote = torch.tensor(alike or not local.numel(), device=local.device)
    everyone = tuple(range(len(split[0].layout.grid.sizes)))
    if not bool(all_gather_small(split[0], everyone, vote).all()):
        return None
    for d in reversed(others):
        local = local.select(d, 0)
    if not isinstance(index, Subdomain):
        return local
    return index.like(local, type(index.layout)((index.layout.dims[dim],), index.layout.grid))
