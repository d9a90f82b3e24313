"""Sorts one long split row, of which no rank has all: a sort by samples.

Each rank sorts its own elements. From samples of all ranks follow the bounds between which each
rank collects elements, which come from all others. What a rank has collected it sorts; then the
parts, of any size, move to the canonical partition. Of equal elements the order is that of one
process, since they come in the order of the ranks and all sorts are stable.
"""

from itertools import pairwise

import torch
from torch import Tensor

from lightning_shard.domain.comm import of_all
from lightning_shard.domain.half import wide
from lightning_shard.domain.layout import partition
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.transfer import Transfer, transferred
from lightning_shard.domain.uneven import exchange_rows, spans_of
from lightning_shard.processes.torch_private.typed import integers


def sorted_rows(x: Subdomain, *, descending: bool) -> tuple[Subdomain, Subdomain]:
    """Sort the elements of a tensor of one split dim of one factor; return their places, too."""
    (factor,), grid = x.layout.dims[0], x.layout.grid
    group, rank = x.domain.group(factor.axes), grid.index(factor.axes)
    ranks = grid.parts(factor.axes)
    low, _ = factor.bounds(grid)
    _, order = _key(x.local.detach()).sort(descending=descending, stable=True)
    values, places = x.local.index_select(0, order), order + low

    part = _parts(_key(values.detach()), ranks, x, descending=descending)
    counts = of_all(torch.bincount(part, minlength=ranks), group).cpu()
    given, got = integers(counts[rank]), integers(counts[:, rank])
    rows = torch.arange(len(values), device=values.device)
    came = torch.arange(sum(got), device=values.device)
    transfer = Transfer(rows, given, came, got, (len(values), sum(got)))
    values, places = (transferred(t, transfer, group) for t in (values, places))
    _, order = _key(values.detach()).sort(descending=descending, stable=True)

    owned = spans_of(integers(counts.sum(0)))
    wanted = list(pairwise(partition(factor.extent, ranks)))
    values, places = (
        exchange_rows(t.index_select(0, order), 0, owned, wanted, group) for t in (values, places)
    )
    return x.like(values), x.like(places)


def _key(x: Tensor) -> Tensor:
    """Cast to a dtype that every device can compare and search."""
    return x.to(torch.uint8) if x.dtype == torch.bool else wide(x)


def _parts(ordered: Tensor, ranks: int, x: Subdomain, *, descending: bool) -> Tensor:
    """The rank that collects each element; equal elements go to one rank."""
    group = x.domain.group(x.layout.axes(0))
    count = len(ordered)
    at = torch.arange(ranks, device=ordered.device) * count // ranks
    samples = ordered[at] if count else ordered.new_zeros(ranks)
    is_there = torch.full((ranks,), count > 0, device=ordered.device)
    every, there = of_all(samples, group), of_all(is_there, group)
    known = every[there]
    known = known[known == known].sort().values  # NaN is in the last part anyway
    if not len(known):
        return torch.zeros_like(ordered, dtype=torch.long)
    cuts = torch.arange(1, ranks, device=ordered.device) * len(known) // ranks
    part = torch.searchsorted(known[cuts], ordered.contiguous(), right=True)
    return ranks - 1 - part if descending else part
