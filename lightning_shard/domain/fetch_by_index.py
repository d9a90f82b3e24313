"""Sends row numbers to the ranks that own these rows, so that rows can be asked for, or sent there.

Which rows an index tensor names is known to nobody else. So each rank counts how many rows it wants
of each other one, all ranks tell each other these counts (and whether a number is out of range, so
that all of them raise), and the row numbers travel to the owners. Then both sides know what comes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.domain.comm import of_all
from lightning_shard.domain.layout import Dim, Grid, Layout, partition
from lightning_shard.domain.subdomain import Domain
from lightning_shard.domain.transfer import Transfer
from lightning_shard.domain.wire import all_to_all
from lightning_shard.processes.torch_private.typed import integers

NUMBER = 4  # bytes of a row number that travels
Complaint = Callable[[int, int], Exception]  # torch's error for a number, of this index of several


@dataclass(frozen=True, eq=False)
class Requests:
    """Rows of a table that this rank names, and those of its own that others name.

    Attributes:
        order: This rank's requests, those to the first rank first.
        asked: Number of requests to each rank.
        rows: The local row numbers of this rank's table that are named, the first rank's first.
        owed: Number of rows that each rank names.
        table: Number of rows of the table on this rank.
        group: The ranks that hold the table.
    """

    order: Tensor
    asked: list[int]
    rows: Tensor
    owed: list[int]
    table: int
    group: dist.ProcessGroup

    @property
    def lookup(self) -> Transfer:
        """Brings the rows that are named to who named them."""
        sizes = self.table, len(self.order)
        return Transfer(self.rows, self.owed, self.order, self.asked, sizes, taken_often=True)

    @cached_property
    def delivery(self) -> Transfer:
        """Brings one row for each request to the owner of what it names, in the order of `rows`."""
        places = torch.arange(len(self.rows), device=self.rows.device)
        sizes = len(self.order), len(self.rows)
        return Transfer(self.order, self.asked, places, self.owed, sizes)


@dataclass(frozen=True, eq=False)
class IndexedRows:
    """The rows that this rank names, and what all ranks know of what each names.

    Attributes:
        owner: Rank that holds each row.
        row: Its local row number there.
        counts: Number of rows that each rank of the domain names of each rank of the group.
        table: The split of the table.
    """

    owner: Tensor
    row: Tensor
    counts: Tensor
    table: Layout
    domain: Domain

    def sends_less_whole(self, row: int) -> bool:
        """Return True if the whole table for every rank is less than the rows that are named.

        All ranks decide alike. A request is a row number and a row, which has `row` bytes.
        """
        parts, extent = self.counts.shape[-1], self.table.shape[0]
        own = int(self.counts.diagonal(dim1=1, dim2=2).sum())
        travel = int(self.counts.sum()) - own
        return travel * (NUMBER + row) >= extent * (parts - 1) * self.counts.shape[0] * row

    def requests(self) -> Requests:
        """Send the row numbers to the owners."""
        grid, axes = self.domain.grid, self.table.axes(0)
        group = self.domain.group(axes)
        order = self.owner.argsort(stable=True)
        others = tuple(a for a in range(len(grid.sizes)) if a not in axes)
        mine, rank = self.counts[grid.index(others)], grid.index(axes)
        asked, owed = integers(mine[rank]), integers(mine[:, rank])
        rows = all_to_all(self.row[order].int(), owed, asked, group).long()
        return Requests(order, asked, rows, owed, self.table.local_shape[0], group)


def named_rows(
    numbers: Tensor, table: Layout, domain: Domain, wrong: Tensor, complaint: Complaint
) -> IndexedRows:
    """Find out who owns the rows of a split table that this rank names.

    Args:
        numbers: Numbers of rows of the table's first dim, of one dim.
        table: The split of the table.
        domain: Its ranks, all of which call.
        wrong: The number out of range that `rows_of` found.
        complaint: Makes torch's error for that.

    Raises:
        Exception: The error that `complaint` makes of a number out of range, on every rank.
    """
    grid, axes = domain.grid, table.axes(0)
    owner, row = _owners(numbers, table.dims[0], grid)
    own = torch.cat([_head(wrong), torch.bincount(owner, minlength=grid.parts(axes))])
    everyone = domain.group(tuple(range(len(grid.sizes))))
    of_ranks = of_all(own, everyone).cpu()
    _refuse(of_ranks[:, :3], complaint)
    others = tuple(a for a in range(len(grid.sizes)) if a not in axes)
    counts = of_ranks[:, 3:].reshape(*grid.sizes, -1).permute(*others, *axes, len(grid.sizes))
    counts = counts.reshape(grid.parts(others), grid.parts(axes), -1)
    return IndexedRows(owner, row, counts, table, domain)


def refuse_out_of_range(domain: Domain, wrong: Tensor, complaint: Complaint) -> None:
    """Raise on every rank of the domain where one of them has a number out of range."""
    everyone = domain.group(tuple(range(len(domain.grid.sizes))))
    _refuse(of_all(_head(wrong), everyone).cpu(), complaint)


def _refuse(heads: Tensor, complaint: Complaint) -> None:
    for there, value, place in map(integers, heads):
        if there:
            raise complaint(value, place)


def _head(wrong: Tensor) -> Tensor:
    head = wrong.new_zeros(3)
    if len(wrong):
        head[0], head[1:] = 1, wrong
    return head


def _owners(numbers: Tensor, factors: Dim, grid: Grid) -> tuple[Tensor, Tensor]:
    """The rank that owns each global row of a product of dims, and its local row there."""
    device = numbers.device
    owner, row = torch.zeros_like(numbers), torch.zeros_like(numbers)
    axes = sorted(a for f in factors for a in f.axes)
    strides = {a: math.prod(grid.sizes[b] for b in axes if b > a) for a in axes}
    stride = torch.ones_like(numbers)
    for factor in reversed(factors):
        place = numbers % factor.extent if factor.extent else numbers
        numbers = numbers // max(factor.extent, 1)
        if not factor.axes:
            row, stride = row + place * stride, stride * factor.extent
            continue
        offsets = torch.tensor(partition(factor.extent, grid.parts(factor.axes)), device=device)
        part = torch.bucketize(place, offsets[1:], right=True).clamp(max=len(offsets) - 2)
        row = row + (place - offsets[part]) * stride
        stride = stride * offsets.diff()[part]
        for a in reversed(factor.axes):
            owner = owner + part % grid.sizes[a] * strides[a]
            part = part // grid.sizes[a]
    return owner, row


def rows_of(
    parts: Sequence[Tensor], extents: Sequence[int], *, negative: bool = True
) -> tuple[Tensor, Tensor]:
    """Find the flat row numbers that indices name in a product of dims, one index for each dim.

    Args:
        parts: The indices, alike in shape.
        extents: Extents of the dims.
        negative: True if numbers may be counted from the end.

    Returns:
        The numbers; and a number that is out of range with the place of its index, or nothing.

    Raises:
        UnsupportedOperationError: The call is being compiled.
    """
    device = parts[0].device
    numbers = torch.zeros(parts[0].shape, dtype=torch.long, device=device)
    wrong = numbers.new_zeros(0)
    for place, (part, extent) in enumerate(zip(parts, extents, strict=True)):
        part = part.long()
        outside = part[(part >= extent) | (part < (-extent if negative else 0))][:1]
        if len(outside) and not len(wrong):
            wrong = torch.cat([outside, outside.new_tensor([place])])
        part = torch.where(part < 0, part + extent, part).clamp(0, max(extent - 1, 0))
        numbers = numbers * extent + part
    return numbers, wrong
