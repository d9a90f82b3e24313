"""Differentiates the small graphs of an operation: of all tiles at once, or each in its turn.

At once is quicker: autograd is asked once, and no tile waits for another. It serves where tiles
exchange by functions that autograd knows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_shard.domain.align import local_part
from lightning_shard.domain.comm import all_reduce
from lightning_shard.domain.layout import Layout
from lightning_shard.processes.torch_private.internals import in_memory
from lightning_shard.tiles.places import Output, Record, Root
from lightning_shard.tiles.tile_tensor import Tiles


class Total:
    """Adds up what tiles give for one plain tensor, as each of them comes.

    Args:
        tiles: The tiles.
        records: True if gradients of the sum are wanted.

    Attributes:
        sum: The sum so far; None before the first tile has given a tensor.
        parts: The tensor of each tile, if gradients are wanted.
    """

    def __init__(self, tiles: Tiles, *, records: bool) -> None:
        self.sum: Tensor | None = None
        self.parts: list[Tensor | None] = [None] * tiles.count
        self._tiles, self._records, self._is_own = tiles, records, False

    def add(self, tile: int, part: Tensor | None) -> None:
        """Add the tensor of a tile; None stands for zeros."""
        if part is None:
            return
        if self._records:
            self.parts[tile] = part
        with torch.no_grad():
            if self.sum is None:
                self.sum = part.detach()  # others may have its memory, so nobody writes it
            elif self._is_own:
                self.sum.add_(part)
            else:
                self.sum, self._is_own = self.sum + part, True
                self._tiles.keep(self.sum)


def at_once(
    record: Record, outputs: list[Output], totals: list[Total | None], given: list[list[Any]]
) -> list[list[Tensor | None]]:
    """Differentiate the small graphs of all tiles as one, and return each tile's gradients."""
    ends: list[GradientEdge] = []
    seeds: list[Tensor] = []
    for tile, locals_ in enumerate(given):
        own_ends, own_seeds = _seeded(record.tiles, outputs, tile, locals_)
        ends += own_ends
        seeds += own_seeds
    starts = [
        root.edges[: None if total is None else 1]
        for root, total in zip(record.roots, totals, strict=True)
    ]
    found = iter(_differentiated(ends, [edge for edges in starts for edge in edges], seeds))
    fields: list[list[Tensor | None]] = []
    for root, total, edges in zip(record.roots, totals, starts, strict=True):
        arrived = [next(found) for _ in edges]
        if total is not None:
            total.add(0, arrived[0])
        else:
            fields.append(_with_copies(root, arrived, record.tiles))
    return [[field[tile] for field in fields] for tile in range(len(given))]


def in_turn(
    record: Record,
    outputs: list[Output],
    totals: list[Total | None],
    tile: int,
    locals_: list[Any],
) -> list[Tensor | None]:
    """Differentiate the small graph of a tile, and return the gradients of its rows."""
    ends, seeds = _seeded(record.tiles, outputs, tile, locals_)
    found = _differentiated(ends, [root.edges[tile] for root in record.roots], seeds)
    arrived: list[Tensor | None] = []
    for root, total, gradient in zip(record.roots, totals, found, strict=True):
        if total is not None:
            total.add(tile, gradient)
        else:
            arrived.append(_of_rows(root, tile, gradient, record.tiles))
    return arrived


def _seeded(
    tiles: Tiles, outputs: list[Output], tile: int, locals_: list[Any]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return where the gradients of a tile's outputs enter its small graph, and these gradients."""
    ends: list[GradientEdge] = []
    seeds: list[Tensor] = []
    for output, local in zip(outputs, locals_, strict=True):
        edge = output.edges[tile]
        if edge is None:
            continue
        ends.append(edge)
        if output.layouts is not None:
            layout = output.layouts[tile]
            seed, count = local_part(local.read(), layout), len(_copies(layout))
            seeds.append(seed / tiles.count * layout.grid.parts(layout.axes()) if count else seed)
        else:
            seeds.append(local if output.is_partial else local / tiles.count)
    return ends, seeds


def _differentiated(
    ends: list[GradientEdge], starts: Sequence[Any], seeds: list[Tensor]
) -> list[Tensor | None]:
    """Return the gradients that arrive at `starts`; None where none does."""
    if not ends or not starts:
        return [None] * len(starts)
    found = torch.autograd.grad(
        ends, starts, seeds, retain_graph=True, create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )  # fmt: skip
    return [None if x is None else in_memory(x) for x in found]


def _copies(layout: Layout) -> list[int]:
    """Return the axes of the grid along which tiles hold the same rows."""
    axes = layout.axes()
    return [axis for axis in range(len(layout.grid.sizes)) if axis not in axes]


def _with_copies(root: Root, found: list[Any], tiles: Tiles) -> list[Tensor | None]:
    """Add up the gradients of tiles that have the same rows."""
    assert root.layouts is not None
    for axis in _copies(root.layouts[0]):
        groups = {tiles.members_along(tile, axis) for tile in range(tiles.count)}
        for group in groups:
            given = [found[tile] for tile in group if found[tile] is not None]
            total = sum(given[1:], given[0]) if given else None
            for tile in group:
                found[tile] = total
    return found


def _of_rows(root: Root, tile: int, found: Tensor | None, tiles: Tiles) -> Tensor | None:
    """Return the gradient that a tile has of its rows; what has the same rows is added up."""
    assert root.layouts is not None
    layout = root.layouts[tile]
    for axis in _copies(layout):
        if found is None:
            found = torch.zeros(
                layout.local_shape, dtype=root.input.dtype, device=root.input.device
            )
        found = all_reduce(found, tiles.domains[tile].group((axis,)))
    return found
