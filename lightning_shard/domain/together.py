"""Exchanges between members of one process, each as one function of the values of all.

Where the graphs of tiles may be one graph, autograd itself carries gradients from one member to
another. So these need no adjoints of their own, in no order of derivatives. Each takes what the
members brought, in their order, and returns what each of them gets.
"""

from collections.abc import Sequence
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


class Sources:
    """The rows of all members, of which each member reads some.

    Args:
        given: The tensor of each member.
        dim: The dim of the rows.
        reads: The rows that each member reads, in their order.
        moves: True where tensors may leave memory. What members read of others is then copied, all
            of one member at once, so that nobody needs all rows of several.
    """

    def __init__(
        self, given: Sequence[Tensor], dim: int, reads: Sequence[Sequence[Read]], *, moves: bool
    ) -> None:
        self.given, self.dim, self._reads = given, dim, reads
        self._copies: dict[Read, Tensor] = {}
        self._uncopied: dict[int, dict[Read, None]] = {}
        for place, each in enumerate(reads) if moves else ():
            for read in each:
                if read[0] != place:
                    self._uncopied.setdefault(read[0], {})[read] = None

    def read_by(self, place: int) -> list[Tensor]:
        """Return the rows that a member reads, each a copy or a view."""
        reads = self._reads[place]
        for peer, _, _ in reads:
            for read in self._uncopied.pop(peer, ()):
                self._copies[read] = self._view(read).clone()
        return [self._copies[read] if read in self._copies else self._view(read) for read in reads]

    def _view(self, read: Read) -> Tensor:
        peer, start, size = read
        return self.given[peer].narrow(self.dim, start, size)


def rows_of(sources: Sources, place: int) -> Tensor:
    """Put the rows that a member reads together, in the format of its own rows."""
    parts, own = sources.read_by(place), sources.given[place]
    if not parts:
        shape = [*own.shape]
        shape[sources.dim] = 0
        return own.new_empty(shape)
    if len(parts) > 1:
        return torch.cat(parts, sources.dim).contiguous(memory_format=format_of(own))
    return parts[0].clone(memory_format=format_of(own))


def exchanged(values: Sequence[tuple[Tensor, Route]], dim: int, *, moves: bool) -> list[Tensor]:
    """`comm.exchange` for all members: the rows that each of them asks for."""
    reads = reads_of(tuple([route for _, route in values]))
    sources = Sources([x for x, _ in values], dim, reads, moves=moves)
    return [rows_of(sources, place) for place in range(len(values))]


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
