"""Plans a convolution that computes while rows travel: in integers, alike on all ranks.

This rank's rows between zeros give all its output rows, if its part of the output lies as its part
of the input does. Then each *strip* of other ranks' rows adds to a few output rows: those rows
convolved with the rows of the kernel that meet them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lightning_shard.domain.fetch import Span
from lightning_shard.domain.halo import Box, Halo, halo_of, places
from lightning_shard.domain.layout import Grid, Layout
from lightning_shard.domain.window import window_needs

INNER = 4  # output rows for each row at the border, from which on the border is worth its price
LEAST = 2**14  # elements of a part; of fewer the numbers cost more than the copy that is saved


class Window(NamedTuple):
    """The window of a convolution along one split dim; `before` and `after` are its padding."""

    dim: int
    kernel: int
    stride: int
    before: int
    after: int
    dilation: int

    @property
    def reads_others(self) -> bool:
        """True if an output row reads more than the input row at its place."""
        return (self.kernel, self.stride, self.before, self.after) != (1, 1, 0, 0)

    @property
    def reach(self) -> int:
        """The rows that one output row reads, with those between."""
        return self.dilation * (self.kernel - 1) + 1

    def output(self, extent: int) -> int:
        """Count the output rows for `extent` input rows."""
        return (extent + self.before + self.after - self.reach) // self.stride + 1

    def under(self, rows: Span, padding: int) -> Span:
        """Return the input rows under output rows, whose windows begin at `-padding`."""
        low, high = rows
        return low * self.stride - padding, (high - 1) * self.stride - padding + self.reach


@dataclass(frozen=True)
class Side:
    """One rank's rows along one split dim, and how many at each end need those of other ranks.

    Attributes:
        rows: Input rows.
        output: Output rows.
        padding: Where the first window begins before the first row.
        first: Output rows at the beginning that need other ranks' rows.
        last: Output rows at the end that need other ranks' rows.
    """

    rows: int
    output: int
    padding: int
    first: int
    last: int


@dataclass(frozen=True)
class Plan:
    """The rows that travel, and the parts of the output that this rank computes meanwhile.

    Attributes:
        halo: The rows that travel.
        paddings: Zeros around this rank's rows in each split dim.
        strips: Parts of this rank's output that other ranks' rows add to.
    """

    halo: Halo
    paddings: dict[int, int]
    strips: tuple["Strip", ...]


@dataclass(frozen=True)
class Strip:
    """Rows of other ranks on one side, and the output rows to which they add something.

    Attributes:
        output: The output rows.
        input: The rows that the windows there read. Those that others have are among them.
        kernel: The rows of the kernel that meet them.
        paddings: Zeros around `input` in each split dim.
        boxes: Where those rows come from.
    """

    output: Box
    input: Box
    kernel: Box
    paddings: dict[int, int]
    boxes: tuple[Box, ...]


@lru_cache(maxsize=4096)
def plan_of(layout: Layout, windows: tuple[Window, ...], thinner: int) -> Plan | None:
    """Plan a convolution of a tensor of this layout; None where it is to wait instead.

    Args:
        layout: The split of the input.
        windows: The windows along the split dims.
        thinner: Factor by which the parts count as thinner; with 0 none is too thin.
    """
    axes = layout.axes(*(w.dim for w in windows))
    if math.prod(layout.shape) < LEAST * layout.grid.parts(axes) * thinner:
        return None
    if not windows or any(len(layout.dims[w.dim]) > 1 for w in windows):
        return None
    if len(windows) > 1 and len(axes) < len(layout.grid.sizes):
        return None  # ranks along some axes of several have no group
    every = [[_side(layout, w, place) for w in windows] for place in places(layout.grid, axes)]
    for each in every:
        if not all(_is_possible(s, w, thinner) for s, w in zip(each, windows, strict=True)):
            return None
    if not any(s.first or s.last for each in every for s in each):
        return None  # no rank needs rows of another, and nobody sends a message
    needs = tuple(
        (w.dim, window_needs(layout.shape[w.dim], layout.grid.parts(layout.axes(w.dim)),
                             w.output(layout.shape[w.dim]), w.kernel, w.stride, w.before,
                             w.dilation))
        for w in windows
    )  # fmt: skip
    sides = [_side(layout, w, layout.grid) for w in windows]
    halo = halo_of(layout, needs)
    return Plan(
        halo,
        {w.dim: side.padding for w, side in zip(windows, sides, strict=True)},
        tuple(_strips(windows, sides, halo)),
    )


def _side(layout: Layout, window: Window, place: Grid) -> Side:
    (factor,) = layout.dims[window.dim]
    low, high = factor.bounds(place)
    output = factor._replace(extent=max(window.output(factor.extent), 0))
    start, end = output.bounds(place)
    padding = window.before + low - start * window.stride
    _, last = window.under((start, end), window.before)
    rows = end - start
    at_first = -(-padding // window.stride) if low > 0 else 0
    inner = (high - low + padding - window.reach) // window.stride + 1  # rows that end within
    at_last = rows - inner if last > high and high < factor.extent else 0
    at_first, at_last = (min(max(n, 0), rows) for n in (at_first, at_last))
    return Side(high - low, rows, padding, at_first, at_last)


def _is_possible(side: Side, window: Window, thinner: int) -> bool:
    """Return True if the rank's rows with zeros around them give its part of the output.

    The rank must also have enough rows for that to be worth its price.

    And whether it has enough rows for that to be worth its price.
    """
    reach = side.rows + 2 * side.padding - window.reach
    if side.padding < 0 or reach < 0 or not side.rows or not side.output:
        return False
    enough = side.output >= INNER * (side.first + side.last) * thinner
    return reach // window.stride + 1 == side.output and enough


def _strips(windows: Sequence[Window], sides: Sequence[Side], halo: Halo) -> list[Strip]:
    """List the strips of output before and after this rank's rows in each dim.

    A strip reaches into the corners of the dims after its own, and has this rank's rows of the dims
    before it, so that each corner counts once.
    """
    found: list[Strip] = []
    each = [*zip(windows, sides, strict=True)]
    own = [((0, s.output), (0, s.rows), (0, w.kernel)) for w, s in each]
    whole = [((0, s.output), w.under((0, s.output), s.padding), (0, w.kernel)) for w, s in each]
    for i, (window, side) in enumerate(each):
        zeros = {w.dim: s.padding for w, s in each[:i]}
        for part, is_before in _cut(window, side):
            boxes = [b for b in halo.receives if b and (b[i][1] <= 0 if is_before else b[i][0] > 0)]
            rows, under, taps = zip(*own[:i], part, *whole[i + 1 :], strict=True)
            found.append(Strip(rows, under, taps, zeros, tuple(boxes)))
    return found


def _cut(window: Window, side: Side) -> list[tuple[tuple[Span, Span, Span], bool]]:
    """Output rows, input rows and rows of the kernel before the rank's rows, and after them."""
    step, kernel = window.dilation, window.kernel
    found: list[tuple[Span, Span, bool]] = []
    if side.first:
        last = min((side.padding - 1) // step + 1, kernel)  # rows of the kernel before row 0
        found.append(((0, side.first), (0, last), True))
    if side.last:
        end = (side.output - 1) * window.stride - side.padding  # where the last window begins
        first = max(-((end - side.rows) // step), 0)  # the first row of the kernel behind the rows
        found.append(((side.output - side.last, side.output), (first, kernel), False))
    return [
        ((rows, _under(window, side, rows, taps), taps), is_before)
        for rows, taps, is_before in found
    ]


def _under(window: Window, side: Side, rows: Span, taps: Span) -> Span:
    """The input rows that these rows of the kernel read for these output rows."""
    low, high = rows[0] * window.stride, (rows[1] - 1) * window.stride
    first, last = taps[0] * window.dilation, (taps[1] - 1) * window.dilation
    return low - side.padding + first, high - side.padding + last + 1
