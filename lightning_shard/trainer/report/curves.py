"""Draws curves as SVG, so that a report needs no package for pictures and prints well."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import torch
from torch import Tensor

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 14, 44  # margins
COLORS = ("#1f5fa8", "#c8541a", "#2d7f4f", "#7a4fa3", "#8c6d1f", "#555555")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "1 4")  # what a printer without colours tells apart
LOGARITHMIC = 30.0  # ratio of the largest value to the smallest from which on the axis is so
MAX_POINTS = 1000


class MeanCurve:
    """Collects the means of a value over windows of steps, without waiting for the device.

    Once there are too many points, two become one.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.points: list[tuple[float, float]] = []
        self._waiting: list[tuple[float, Tensor]] = []
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, value: Tensor) -> None:
        """Take the value of one step, which lies on its device."""
        value = value.detach().float().reshape(())
        self._sum = value if self._sum is None else self._sum + value
        self._count += 1

    def close(self, step: int) -> None:
        """End a window: its mean becomes a point."""
        if self._sum is not None:
            self._waiting.append((step, self._sum / self._count))
        self._sum, self._count = None, 0

    def read(self) -> None:
        """Bring the points from the device."""
        if not self._waiting:
            return
        values = torch.stack([value for _, value in self._waiting]).tolist()
        self.points += zip((step for step, _ in self._waiting), values, strict=True)
        self._waiting.clear()
        while len(self.points) > MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [(after[0], (before[1] + after[1]) / 2) for before, after in pairs]


def chart(lines: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """Draw lines of points (x, y) with axes and a legend; values that are not finite are left out.

    Args:
        lines: The points of each line, by its name.
        x_label: What the horizontal axis counts.
        y_label: What the vertical axis shows.

    Returns:
        An `svg` element; an empty text if there is no point to draw.
    """
    finite = {
        name: [p for p in points if all(map(math.isfinite, p))] for name, points in lines.items()
    }
    shown = {name: points for name, points in finite.items() if points}
    if not shown:
        return ""
    x_axis = _Axis.of((x for points in shown.values() for x, _ in points), LEFT, WIDTH - RIGHT)
    y_axis = _Axis.of(
        (y for points in shown.values() for _, y in points), HEIGHT - BOTTOM, TOP, may_be_log=True
    )
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)}">',
        *_frame(x_axis, y_axis, x_label, y_label),
        *(_line(points, x_axis, y_axis, index) for index, points in enumerate(shown.values())),
        *_legend(list(shown)),
        "</svg>",
    ]
    return "\n".join(parts)


class _Axis:
    """Maps values to places on the page, and knows where its ticks are."""

    def __init__(self, low: float, high: float, begin: float, end: float, *, log: bool) -> None:
        self.low, self.high, self.begin, self.end, self.log = low, high, begin, end, log
        ticks = _powers(low, high) if log else _steps(low, high)
        self.ticks = [tick for tick in ticks if low <= tick <= high * (1 + 1e-9)]

    @classmethod
    def of(
        cls, values: Iterable[float], begin: float, end: float, *, may_be_log: bool = False
    ) -> "_Axis":
        found = list(values)
        low, high = min(found), max(found)
        if low == high:  # one point, or a constant
            room = abs(low) / 10 or 0.5
            low, high = low - room, high + room
        log = may_be_log and low > 0 and high / low > LOGARITHMIC
        room = 0.04 * (high - low) if may_be_log else 0.0
        low, high = (low / 1.15, high * 1.15) if log else (low - room, high + room)
        return cls(low, high, begin, end, log=log)

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)


def _steps(low: float, high: float) -> list[float]:
    """About five round numbers."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them where they are few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(exponents) <= 3 else (1,)
    stride = max(1, len(exponents) // 6)
    return [f * 10.0**e for e in exponents[::stride] for f in factors]


def _frame(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> list[str]:
    bottom, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    parts: list[str] = []
    for tick in x_axis.ticks:
        x = x_axis.place(tick)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{tick:g}</text>')
    for tick in y_axis.ticks:
        y = y_axis.place(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>')
    center = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{center}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}{' (log)' if y_axis.log else ''}</text>"
    )
    return parts


def _line(points: Points, x_axis: _Axis, y_axis: _Axis, index: int) -> str:
    places = [f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in points]
    style = f'stroke="{COLORS[index % len(COLORS)]}"'
    if len(places) == 1:
        x, y = places[0].split(",")
        return f'<circle cx="{x}" cy="{y}" r="3" {style} class="line"/>'
    dash = DASHES[index % len(DASHES)]
    return f'<polyline points="{" ".join(places)}" {style} stroke-dasharray="{dash}" class="line"/>'


def _legend(names: Sequence[str]) -> list[str]:
    parts: list[str] = []
    for index, name in enumerate(names):
        y = TOP + 10 + 17 * index
        x = WIDTH - RIGHT - 10
        parts.append(
            f'<path d="M{x - 28} {y}H{x}" stroke="{COLORS[index % len(COLORS)]}" '
            f'stroke-dasharray="{DASHES[index % len(DASHES)]}" class="line"/>'
        )
        parts.append(
            f'<text x="{x - 34}" y="{y + 4}" text-anchor="end" class="name">{escape(name)}</text>'
        )
    return parts
