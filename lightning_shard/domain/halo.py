"""The rows around a rank's part, which one message brings while the rank computes on its own rows.

Along each split dim a rank needs some rows before and after its own. `Halo` says in integers what
then travels between all ranks, for several split dims at once, with the corners. Places are local:
a rank's own rows begin at 0, and those before them have negative places.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.domain.fetch import Needs, Span
from lightning_shard.domain.layout import Grid, Layout, partition
from lightning_shard.domain.wire import begin_all_to_all, packed

Box = tuple[Span, ...]  # the rows [low, high) of each of a few dims
Mode = Literal["auto", "always", "never"]

# a variable of the process, not a ContextVar: backward runs in threads that inherit no context
_mode: Mode = "auto"
PROCESS_STATE = {"_mode": _mode}


@contextmanager
def overlapping(mode: Mode) -> Generator[None]:
    """Choose, while open, whether rules compute while rows travel; on all ranks alike.

    Args:
        mode: "auto" decides by the sizes. "always" does it wherever it is possible, and "never"
            waits for the rows first. Results differ by rounding only.
    """
    global _mode
    before: Mode = _mode
    _mode = mode
    try:
        yield
    finally:
        _mode = before


def overlap_mode() -> Mode:
    """Give the mode that was chosen, "auto" by default."""
    return _mode


def thinness() -> int:
    """Return by which factor "auto" takes parts to be thinner; 0 lets no part be too thin."""
    return 0 if _mode == "always" else 1


@dataclass(frozen=True)
class Halo:
    """The boxes of rows that travel between ranks, seen from one rank.

    Attributes:
        dims: The dims that a box has rows of.
        axes: The mesh axes along which ranks talk.
        sends: The box of this rank's rows that each peer needs.
        receives: The box of each peer's rows that this rank needs, by this rank's places.
    """

    dims: tuple[int, ...]
    axes: tuple[int, ...]
    sends: tuple[Box | None, ...]
    receives: tuple[Box | None, ...]


@lru_cache(maxsize=4096)
def halo_of(layout: Layout, needs: tuple[tuple[int, Needs], ...]) -> Halo:
    """Compute which boxes this rank sends and receives.

    Args:
        layout: The layout of the split tensor; each of the dims below has one factor.
        needs: Split dims, each with the one span of global rows that each rank along it needs.
    """
    dims = tuple(dim for dim, _ in needs)
    axes = layout.axes(*dims)
    ranks = [*places(layout.grid, axes)]
    sends = [_box(layout, needs, layout.grid, peer) for peer in ranks]
    receives = [_box(layout, needs, peer, layout.grid) for peer in ranks]
    me = layout.grid.index(axes)
    sends[me] = receives[me] = None
    return Halo(dims, axes, tuple(sends), tuple(receives))


def places(grid: Grid, axes: tuple[int, ...]) -> Sequence[Grid]:
    """Return the ranks that differ along `axes` only, in the order of their group."""
    found: list[Grid] = []
    for coord in itertools.product(*(range(grid.sizes[a]) for a in axes)):
        place = dict(enumerate(grid.coord)) | dict(zip(axes, coord, strict=True))
        found.append(Grid(grid.sizes, tuple(place.values())))
    return found


def _box(
    layout: Layout, needs: tuple[tuple[int, Needs], ...], owner: Grid, other: Grid
) -> Box | None:
    """The owner's rows that the other rank needs, by the places of this rank."""
    spans: list[Span] = []
    for dim, wanted in needs:
        (factor,) = layout.dims[dim]
        offsets = partition(factor.extent, layout.grid.parts(factor.axes))
        held, mine = owner.index(factor.axes), layout.grid.index(factor.axes)
        for first, last in wanted[other.index(factor.axes)]:
            low, high = max(first, offsets[held]), min(last, offsets[held + 1])
            if low < high:
                spans.append((low - offsets[mine], high - offsets[mine]))
    return tuple(spans) if len(spans) == len(needs) else None


def send_halo(x: Tensor, halo: Halo, group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
    """Begin to send my rows to the ranks around; the function returned waits for theirs.

    It gives one tensor for each box in `receives`, in order.
    """
    pieces = [None if box is None else part_of(x, halo.dims, box) for box in halo.sends]
    return _begin(pieces, [_shape(x, halo.dims, box) for box in halo.receives], x, group)


def return_halo(
    boxes: dict[Box, Tensor], halo: Halo, like: Tensor, group: dist.ProcessGroup
) -> Callable[[Tensor], None]:
    """Begin to send what belongs to other ranks' rows back; the adjoint of `send_halo`.

    What is not among `boxes` is zeros.

    The function returned waits for what comes, and adds it to its argument, this rank's rows.
    """
    pieces = [
        None if box is None else boxes[box] if box in boxes else framed(like, halo.dims, box, {})
        for box in halo.receives
    ]
    wait = _begin(pieces, [_shape(like, halo.dims, box) for box in halo.sends], like, group)

    def add_to(x: Tensor) -> None:
        sent = [box for box in halo.sends if box is not None]
        for box, part in zip(sent, wait(), strict=True):
            part_of(x, halo.dims, box).add_(part)

    return add_to


def part_of(x: Tensor, dims: Sequence[int], box: Box) -> Tensor:
    """Return the rows of a box, as a view."""
    for dim, (low, high) in zip(dims, box, strict=True):
        x = x.narrow(dim, low, high - low)
    return x


def framed(like: Tensor, dims: Sequence[int], frame: Box, parts: dict[Box, Tensor]) -> Tensor:
    """Put the rows in `frame` together from the boxes that have some of them, and zeros.

    Where one box has just these rows, they are its own, not a copy.
    """
    if frame in parts:
        return parts[frame]
    result = like.new_zeros(_shape(like, dims, frame) or ())
    for ours, theirs in _common(result, dims, frame, parts):
        ours.copy_(theirs)
    return result


def add_framed(
    x: Tensor, dims: Sequence[int], frame: Box, boxes: Sequence[Box], sums: dict[Box, Tensor]
) -> None:
    """Add rows `x` of `frame` to the sums of those boxes that have some of them.

    The adjoint of `framed`. A box without a sum gets one, which may be `x` itself.
    """
    if frame in boxes and frame not in sums:
        sums[frame] = x
        return
    for box in boxes:
        if box not in sums:
            sums[box] = x.new_zeros(_shape(x, dims, box) or ())
    for ours, theirs in _common(x, dims, frame, {box: sums[box] for box in boxes}):
        theirs.add_(ours)


def _common(
    x: Tensor, dims: Sequence[int], frame: Box, parts: dict[Box, Tensor]
) -> Generator[tuple[Tensor, Tensor]]:
    """Pair the rows of the frame with those of each box that shares some with it."""
    for box, part in parts.items():
        shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(frame, box, strict=True))
        if all(low < high for low, high in shared):
            yield (
                part_of(x, dims, _seen_from(frame, shared)),
                part_of(part, dims, _seen_from(box, shared)),
            )


def _seen_from(origin: Box, box: Box) -> Box:
    spans = zip(origin, box, strict=True)
    return tuple((low - start, high - start) for (start, _), (low, high) in spans)


def _begin(
    pieces: Sequence[Tensor | None],
    shapes: Sequence[Sequence[int] | None],
    like: Tensor,
    group: dist.ProcessGroup,
) -> Callable[[], list[Tensor]]:
    outgoing = packed([piece for piece in pieces if piece is not None], like)
    sizes = [0 if shape is None else torch.Size(shape).numel() for shape in shapes]
    given = [0 if piece is None else piece.numel() for piece in pieces]
    wait = begin_all_to_all(outgoing, sizes, given, group)

    def arrived() -> list[Tensor]:
        came = wait()
        wanted = [(size, shape) for size, shape in zip(sizes, shapes, strict=True) if shape]
        if len(wanted) == 1:
            return [came.view(wanted[0][1])]
        parts = came.split_with_sizes([size for size, _ in wanted])
        return [part.view(shape) for part, (_, shape) in zip(parts, wanted, strict=True)]

    return arrived


def _shape(x: Tensor, dims: Sequence[int], box: Box | None) -> list[int] | None:
    if box is None:
        return None
    shape = list(x.shape)
    for dim, (low, high) in zip(dims, box, strict=True):
        shape[dim] = high - low
    return shape
