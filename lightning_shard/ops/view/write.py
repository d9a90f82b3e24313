"""Brings rows to the ranks that own the places where they are written, added or compared.

The owners then call torch's own function on their parts, so values and gradients are torch's. Into
a whole target each rank adds its rows up, and one all-reduce joins these partial sums.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_shard.domain.align import sum_over, take_local, whole
from lightning_shard.domain.fetch import scatter_sum
from lightning_shard.domain.fetch_by_index import Complaint, named_rows, refuse_out_of_range
from lightning_shard.domain.half import wide
from lightning_shard.domain.layout import Factor, partition
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.transfer import transferred

Function = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows that this rank writes into a split tensor.

    Attributes:
        numbers: Number of the target's row to which each row goes.
        wrong: The number out of range that `rows_of` found.
        values: The rows; None where one number is written.
        axes: The mesh axes that split them; ranks along the others have the same.
        order: Where the result depends on it, their places in the order of one process.
    """

    numbers: Tensor
    wrong: Tensor
    values: Tensor | None
    axes: tuple[int, ...]
    order: Tensor | None = None

    def chosen(self, places: Tensor) -> "Rows":
        """Only these of the rows."""
        values, order = (None if v is None else v.index_select(0, places)
                         for v in (self.values, self.order))  # fmt: skip
        return replace(self, numbers=self.numbers[places], values=values, order=order)


@dataclass(frozen=True, eq=False)
class Writing:
    """A function that writes rows.

    Attributes:
        run: Takes a target, the numbers of its rows, and the rows; gives a new target.
        complaint: Makes torch's error for a number that is out of range.
        adds: True to add rows to what is there.
    """

    run: Function
    complaint: Complaint
    adds: bool


def written(x: Subdomain, rows: Rows, writing: Writing) -> Tensor:
    """Write rows of the first dim of `x`, and return this rank's part of the result.

    All ranks call; dims of `x` but the first are those of the rows.
    """
    axes = x.layout.axes(0)
    beyond = tuple(a for a in rows.axes if a not in axes)
    if not axes and not beyond:
        if len(rows.wrong):
            raise writing.complaint(*rows.wrong.tolist())
        return writing.run(x.local, rows.numbers, rows.values)
    if beyond and not writing.adds:
        return _of_owners(x, rows, writing, tuple(sorted({*axes, *beyond})))
    if not beyond:
        return _delivered(x, rows, writing)
    zeros, rows = _to_sum(x.like(x.local.new_zeros(x.local.shape)), rows)
    if axes:
        partial = _delivered(zeros, rows, writing)
    else:
        refuse_out_of_range(x.domain, rows.wrong, writing.complaint)
        partial = writing.run(zeros.local, rows.numbers, rows.values)
    split = x.like(x.local, x.layout.with_dim(0, x.shape[0], beyond))
    return (x.local + sum_over(split, partial, [0])).to(x.dtype)


def _to_sum(zeros: Subdomain, rows: Rows) -> tuple[Subdomain, Rows]:
    """Return both in float32 if they are in one half precision, for partial sums of a rank."""
    if rows.values is None or rows.values.dtype != zeros.dtype:
        return zeros, rows
    return zeros.like(wide(zeros.local)), replace(rows, values=wide(rows.values))


def _of_owners(x: Subdomain, rows: Rows, writing: Writing, axes: tuple[int, ...]) -> Tensor:
    """Split the target over all ranks that write, and put it together again."""
    dim = (Factor(x.shape[0], axes),)
    grid = x.layout.grid
    everywhere = whole(x, 0)
    part = take_local(everywhere.local, 0, dim, grid)
    parted = x.like(part, everywhere.layout.with_dims({0: dim}))
    found = whole(parted.like(_delivered(parted, rows, writing)), 0).local
    return take_local(found, 0, x.layout.dims[0], grid) if x.layout.axes(0) else found


def _delivered(x: Subdomain, rows: Rows, writing: Writing) -> Tensor:
    """Send the rows to the owners of a split target, which write them."""
    grid, axes = x.layout.grid, x.layout.axes(0)
    rows = _shared_out(rows, x)
    named = named_rows(rows.numbers, x.layout, x.domain, rows.wrong, writing.complaint)
    if not rows.axes:
        mine = (named.owner == grid.index(axes)).nonzero().squeeze(1)
        own = rows.chosen(mine)
        return writing.run(x.local, named.row[mine], own.values)
    size = math.prod(x.shape[1:]) * x.dtype.itemsize
    if writing.adds and len(x.layout.dims[0]) == 1 and named.sends_less_whole(size):
        layout = x.layout.with_dim(0, x.shape[0], ())
        zeros = x.like(x.local.new_zeros(x.shape[0], *x.local.shape[1:]), layout)
        zeros, rows = _to_sum(zeros, rows)
        partial = zeros.like(writing.run(zeros.local, rows.numbers, rows.values))
        return (x.local + scatter_sum(partial, 0, axes).local).to(x.dtype)
    requests = named.requests()
    numbers, values = requests.rows, rows.values
    if values is not None:
        values = transferred(values, requests.delivery, requests.group)
    if rows.order is not None:
        order = transferred(rows.order, requests.delivery, requests.group).argsort()
        numbers = numbers[order]
        values = None if values is None else values.index_select(0, order)
    return writing.run(x.local, numbers, values)


def _shared_out(rows: Rows, x: Subdomain) -> Rows:
    """Each row on one rank of those that split the target, or on all of them."""
    axes = x.layout.axes(0)
    missing = tuple(a for a in axes if a not in rows.axes)
    if not rows.axes or not missing:
        return rows
    grid = x.layout.grid
    cuts = partition(len(rows.numbers), grid.parts(missing))
    place = grid.index(missing)
    mine = rows.numbers.new_tensor(range(cuts[place], cuts[place + 1]))
    return replace(rows.chosen(mine), axes=tuple(sorted({*rows.axes, *axes})))
