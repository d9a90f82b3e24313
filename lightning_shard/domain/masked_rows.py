"""Counts the rows that a split mask chooses, and moves them to the canonical partition.

No rank knows how many rows another one's part of a mask chooses. So the ranks tell each other their
counts, once. From then on the number M of all rows that were chosen is known everywhere, and so is
who owns which of them: the partition of M. In the order of one process, the rows of several ranks
may alternate (of a mask whose second dim is split). Between two of its runs of neighbouring rows a
rank's rows keep their order; hence counts are of runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_shard.domain.align import gathered, places_by_rank, take_local
from lightning_shard.domain.layout import Dim, Factor, Grid, Layout, merge, partition
from lightning_shard.domain.subdomain import Domain, Subdomain
from lightning_shard.domain.transfer import Transfer, transferred
from lightning_shard.processes.torch_private.typed import integers


@dataclass(frozen=True, eq=False)
class Chosen:
    """The rows that a mask chooses.

    Attributes:
        places: This rank's rows among them, by their local flat places in the mask.
        numbers: The same rows' numbers in the global order of all rows that are chosen.
        factor: The split of all of them once they are moved: their count M, and the mesh axes.
        transfer: Moves rows of the mask's places to the canonical partition of M.
    """

    places: Tensor
    numbers: Tensor
    factor: Factor
    transfer: Transfer | None

    def moved(self, rows: Tensor, domain: Domain) -> Tensor:
        """Bring this rank's part of the chosen rows of all ranks; `rows` has one for each place."""
        if self.transfer is None:
            return rows.index_select(0, self.places)
        return transferred(rows, self.transfer, domain.group(self.factor.axes))

    def returned(self, rows: Tensor, domain: Domain) -> Tensor:
        """Bring back this rank's rows among all chosen rows, one for each of `places`."""
        if self.transfer is None:
            return rows
        back = transferred(rows, self.transfer.turned, domain.group(self.factor.axes))
        return back.index_select(0, self.places)


def chosen_by(mask: Subdomain) -> Chosen:
    """Count and number the rows that a mask chooses, in the order of one process.

    All ranks that split the mask must call. A whole mask chooses on every rank by itself.

    Raises:
        UnsupportedOperationError: The call is being compiled.
    """
    places = mask.local.reshape(-1).nonzero().squeeze(1)
    axes = mask.layout.axes()
    if not axes:
        numbers = torch.arange(len(places), device=places.device)
        return Chosen(places, numbers, Factor(len(places)), None)
    grid, device = mask.layout.grid, mask.local.device
    runs, length = _runs(merge([f for dim in mask.layout.dims for f in dim]), grid)
    layout = Layout((runs,), grid)
    own = mask.local.reshape(layout.local_shape[0], length).sum(1)
    counts = gathered(mask.like(own, layout))
    owner = _owners(runs, axes, grid).to(device)
    before = counts.cumsum(0) - counts
    total, rank, ranks = int(counts.sum()), grid.index(axes), grid.parts(axes)
    offsets = partition(total, ranks)

    mine = (owner == rank).nonzero().squeeze(1)
    first_of_run = own.cumsum(0) - own
    shift = (before[mine] - first_of_run).repeat_interleave(own, output_size=len(places))
    numbers = shift + torch.arange(len(places), device=device)
    cuts = torch.searchsorted(numbers, torch.tensor(offsets, device=device))

    low, high = offsets[rank], offsets[rank + 1]
    inside = ((before + counts).clamp(low, high) - before.clamp(low, high)).clamp(min=0)
    owner_of_row = owner.repeat_interleave(inside, output_size=high - low)
    got = torch.bincount(owner_of_row, minlength=ranks)
    given, received = map(integers, torch.stack([cuts.diff(), got]).cpu())
    put = owner_of_row.argsort(stable=True)
    sizes = mask.local.numel(), high - low
    transfer = Transfer(places, given, put, received, sizes)
    return Chosen(places, numbers, Factor(total, axes), transfer)


def _runs(factors: Dim, grid: Grid) -> tuple[Dim, int]:
    """The runs of neighbouring rows that ranks have of a product of dims, and mine's length.

    There is one for each index of the factors before the last split one, and each part of that.
    """
    last = max(i for i, f in enumerate(factors) if f.axes)
    parts = Factor(grid.parts(factors[last].axes), factors[last].axes)
    length = factors[last].rows(grid)
    for factor in factors[last + 1 :]:
        length *= factor.extent
    return (*factors[:last], parts), length


@lru_cache(maxsize=256)
def _owners(runs: Dim, axes: tuple[int, ...], grid: Grid) -> Tensor:
    """The rank of each run."""
    places = places_by_rank(runs, axes, grid)
    owners = torch.empty(sum(map(len, places)), dtype=torch.long, device="cpu")
    for rank, own in enumerate(places):
        owners[own] = rank
    return owners


def global_rows(factors: Dim, grid: Grid, device: torch.device) -> Tensor:
    """Return the global rows that this rank holds of a dim, in their local order."""
    rows = torch.arange(Layout((factors,), grid).shape[0], device=device)
    return take_local(rows, 0, factors, grid)


def flat_places(layout: Layout, extents: Sequence[int], device: torch.device) -> Tensor:
    """Find the places of this rank's elements in a flattened tensor of `extents` or larger."""
    found = torch.zeros((), dtype=torch.long, device=device)
    for dim, extent in zip(layout.dims, extents, strict=True):
        found = found.unsqueeze(-1) * extent + global_rows(dim, layout.grid, device)
    return found.reshape(layout.local_shape)
