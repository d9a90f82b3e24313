"""The domain of a tile: its place among the tiles, and the groups by which they exchange."""

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Grid
from lightning_shard.domain.local_group import Later, LocalGroup
from lightning_shard.domain.subdomain import Domain
from lightning_shard.tiles.crew import Crew

_COMBINE: dict[Any, Any] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class TileGroup(LocalGroup):
    """Lets a tile exchange with others along some axes of the grid of tiles.

    Args:
        crew: Runs the tiles.
        members: The tiles of the group.
        rank: The place among them of the tile that holds this object.
    """

    def __init__(self, crew: Crew, members: tuple[int, ...], rank: int) -> None:
        self.crew, self.members, self.rank = crew, members, rank

    def size(self) -> int:
        """Return the number of members."""
        return len(self.members)

    def exchange(self, outgoing: Tensor, sizes: Sequence[int], given: Sequence[int]) -> Tensor:
        """Give each member its piece of `outgoing`, and return the pieces that come."""
        arrived = self._meet((outgoing, list(given)), _exchanged, "all_to_all")
        return arrived.to(outgoing.device)  # waiting tensors are exchanged in the host's memory

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Replace `x` by the sum, maximum or minimum over the members."""
        combine = _COMBINE[op]

        def reduced(values: list[Tensor]) -> list[Any]:
            total = values[0].clone()
            for value in values[1:]:
                total = combine(total, value)
            for value in values:
                value.copy_(total)
            return [None] * len(values)

        self._meet(x.detach(), reduced, f"all_reduce ({op})")

    @property
    def joins(self) -> bool:
        """True while the graphs of the tiles may be one."""
        return self.crew.joins

    @property
    def moves(self) -> bool:
        """True while tensors of tiles may leave the device, so that each is best read alone."""
        return self.crew.mover is not None and not self.crew.mover.sleeps

    def together(self, value: Any, compute: Callable[[list[Any]], list[Any]]) -> Any:
        """Bring a value, and return what `compute` gives this member, with its graph."""
        return self.crew.meet(self.members, self.rank, value, compute, "together", has_graph=True)

    def later(self, value: Any, compute: Callable[[list[Any]], list[Any]]) -> Later[Any]:
        """Bring a value without waiting; the result has its graph."""
        return self.crew.bring_early(self.members, self.rank, value, compute)

    def objects(self, value: Any) -> list[Any]:
        """Return the `value` of each member."""
        return self._meet(value, lambda values: [list(values) for _ in values], "objects")

    def _meet(self, value: Any, compute: Any, kind: str) -> Any:
        return self.crew.meet(self.members, self.rank, value, compute, kind)


def _exchanged(values: list[tuple[Tensor, list[int]]]) -> list[Tensor]:
    pieces = [source.split_with_sizes(given) for source, given in values]
    return [torch.cat(arrived) for arrived in zip(*pieces, strict=True)]


class TileDomain(Domain):
    """Gives one tile its place among the others.

    Args:
        crew: Runs the tiles.
        sizes: The number of tiles along each axis of their grid.
        tile: The number of the tile, row by row.
    """

    def __init__(self, crew: Crew, sizes: tuple[int, ...], tile: int) -> None:
        places = [*itertools.product(*map(range, sizes))]
        self.crew, self.tile, self.grid = crew, tile, Grid(sizes, places[tile])
        self.writes_plain = tile == 0
        axes: list[tuple[int, ...]] = [(axis,) for axis in range(len(sizes))]
        if len(sizes) > 1:
            axes.append(tuple(range(len(sizes))))
        self._groups = {each: self._group_along(each, places) for each in axes}

    def _group_along(self, axes: tuple[int, ...], places: list[tuple[int, ...]]) -> ProcessGroup:
        own = places[self.tile]
        members = tuple(
            number
            for number, place in enumerate(places)
            if all(place[a] == own[a] for a in range(len(own)) if a not in axes)
        )
        # rules hand it on, and ask it by domain/local_group.py and domain/wire.py only
        return cast("ProcessGroup", TileGroup(self.crew, members, members.index(self.tile)))

    @property
    def ranks(self) -> list[int]:
        """Refused: tiles are no ranks of a process group."""
        raise UnsupportedOperationError(
            "tiles are no ranks of a process group, as SyncBatchNorm asks for; take BatchNorm, "
            "which has the statistics of the whole field in tiles"
        )

    @property
    def exchanges_on(self) -> None:
        """Tiles exchange tensors of any device."""

    def decides(self, question: Callable[[], bool]) -> bool:
        """Give the answer of the tile that was asked first in the same operation."""
        number = self.crew.asked[self.tile]
        self.crew.asked[self.tile] += 1
        if number == len(self.crew.answers):
            self.crew.answers.append(question())
        return self.crew.answers[number]

    def any_says(self, question: Callable[[], bool], device: torch.device) -> bool:
        """Give the answer of the tile that was asked first, which all give of one process."""
        return self.decides(question)

    def at_end(self, write: Callable[[], None]) -> None:
        """Leave a write to the caller of the operation."""
        self.crew.at_end.append(write)

    def drawing(
        self, generator: torch.Generator | None, device: torch.device
    ) -> AbstractContextManager[None]:
        """Let this tile draw what the first one draws in the same operation."""
        return _drawing(self.crew, self.tile, generator, device)


@contextmanager
def _drawing(
    crew: Crew, tile: int, generator: torch.Generator | None, device: torch.device
) -> Generator[None]:
    number, crew.draws[tile] = crew.draws[tile], crew.draws[tile] + 1
    if number == len(crew.states):  # nobody has drawn yet
        crew.states.append(_state(generator, device))
        yield
        return
    after = _state(generator, device)
    _set_state(generator, device, crew.states[number])
    try:
        yield
    finally:
        _set_state(generator, device, after)


def _state(generator: torch.Generator | None, device: torch.device) -> tuple[Tensor, ...]:
    """Return the state of a generator; by default of those of the host and of the device."""
    if generator is not None:
        return (generator.get_state(),)
    if device.type == "cpu":
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)


def _set_state(
    generator: torch.Generator | None, device: torch.device, states: tuple[Tensor, ...]
) -> None:
    if generator is not None:
        generator.set_state(states[0])
        return
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
