"""Exchanges between members of one process, each as one function of the values of all.

Where the graphs of tiles may be one graph, autograd itself carries gradients from one member to
another. So these need no adjoints of their own, in no order of derivatives. Each takes what the
members brought, in their order, and returns what each of them gets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_shard.domain.memory_format import format_of


@dataclass(frozen=True)
class Route:
    """The pieces that travel in an `exchange`, seen from one rank, by the sender's local rows.

    Attributes:
        sends: The `(start, length)` pieces of this rank's rows that each peer wants.
        receives: Lengths of the pieces that come from each peer.
        order: The received pieces `(peer, number)` in the order in which they are put together.
        moves: True if any rank of the group needs a row of another; the same on all ranks.
    """

    sends: tuple[tuple[tuple[int, int], ...], ...]
    receives: tuple[tuple[int, ...], ...]
    order: tuple[tuple[int, int], ...]
    moves: bool


Read = tuple[int, int, int]  # a member, the first of its rows that are read, and their number


@lru_cache(maxsize=4096)
def reads_of(routes: tuple[Route, ...]) -> list[list[Read]]:
    """List the rows that each member reads, in the order in which they are put together."""
    return [
        [(peer, *routes[peer].sends[place][number]) for peer, number in route.order]
        for place, route in enumerate(routes)
    ]


def strips_of(
    given: Sequence[Tensor], dim: int, reads: Sequence[Sequence[Read]]
) -> dict[Read, Tensor]:
    """Copy the rows that members read of others, so that nobody needs all rows of several."""
    return {
        read: given[read[0]].narrow(dim, *read[1:]).clone()
        for place, each in enumerate(reads)
        for read in each
        if read[0] != place
    }


def rows_of(
    given: Sequence[Tensor],
    place: int,
    dim: int,
    reads: Sequence[Read],
    strips: Mapping[Read, Tensor],
) -> Tensor:
    """Put rows of several members together for one of them, in the format of its own rows.

    Args:
        given: The tensor of each member.
        place: The member.
        dim: The dim of the rows.
        reads: The rows, in their order.
        strips: Copies of some of them.
    """
    parts = [part_of(given, dim, read, strips) for read in reads]
    own = given[place]
    if not parts:
        shape = [*own.shape]
        shape[dim] = 0
        return own.new_empty(shape)
    if len(parts) > 1:
        return torch.cat(parts, dim).contiguous(memory_format=format_of(own))
    return parts[0].clone(memory_format=format_of(own))


def part_of(given: Sequence[Tensor], dim: int, read: Read, strips: Mapping[Read, Tensor]) -> Tensor:
    """Return the rows that a member reads of one member: a copy of them, or a view."""
    peer, start, size = read
    return strips[read] if read in strips else given[peer].narrow(dim, start, size)


def exchanged(values: Sequence[tuple[Tensor, Route]], dim: int, *, moves: bool) -> list[Tensor]:
    """`comm.exchange` for all members: the rows that each of them asks for."""
    given, routes = [x for x, _ in values], tuple([route for _, route in values])
    every = reads_of(routes)
    strips = strips_of(given, dim, every) if moves else {}
    return [rows_of(given, n, dim, reads, strips) for n, reads in enumerate(every)]


def added_to_owners(values: Sequence[tuple[Tensor, Route, int]], dim: int) -> list[Tensor]:
    """`comm.add_to_owners` for all members: the rows of each, summed over what comes back."""
    found: list[Tensor] = []
    for y, _, rows in values:
        shape = [*y.shape]
        shape[dim] = rows
        found.append(y.new_zeros(shape).contiguous(memory_format=format_of(y)))
    for (y, _, _), reads in zip(
        values, reads_of(tuple([route for _, route, _ in values])), strict=True
    ):
        pieces = y.split_with_sizes([size for _, _, size in reads], dim)
        for (peer, start, size), piece in zip(reads, pieces, strict=True):
            if size:
                found[peer].narrow(dim, start, size).add_(piece)
    return found


def summed(values: Sequence[Tensor]) -> list[Tensor]:
    """`comm.all_reduce` for all members: the sum, each in memory of its own."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return [total, *(total.clone() for _ in values[1:])]


def transposed(
    values: Sequence[Tensor], split: int, join: int, split_sizes: Sequence[int]
) -> list[Tensor]:
    """`comm.transpose` for all members: dim `join` whole instead of dim `split`."""
    pieces = [x.split_with_sizes([*split_sizes], split) for x in values]
    return [
        torch.cat(parts, join).contiguous(memory_format=format_of(x))
        for x, parts in zip(values, zip(*pieces, strict=True), strict=True)
    ]
