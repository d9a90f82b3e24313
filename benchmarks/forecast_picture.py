"""Draws predicted against measured steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common import MIB
from benchmarks.forecast_cases import BAR, NETWORKS, Case


def draw(cases: Sequence[Case], file: Path) -> None:
    """Predicted against measured time and memory, with the lines of equality and of the bar."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (what, unit, label) in enumerate(
        (("seconds", 1.0, "seconds of a step"), ("memory", MIB, "peak, MiB"))
    ):
        known = [c for c in cases if what in c.get("predicted", {})]
        if not known:
            continue
        axes: Any = figure.add_subplot(1, 2, place + 1)
        for network, marker in zip(NETWORKS, "osD^", strict=True):
            mine = [c for c in known if c["network"] == network]
            measured_ones = [c[what] / unit for c in mine]
            axes.plot(measured_ones, [c["predicted"][what] / unit for c in mine], marker,
                      label=network, alpha=0.7, markersize=5)  # fmt: skip
        ends = [f(c[what] / unit for c in known) for f in (min, max)]
        for factor, style in ((1, "-"), (1 + BAR, ":"), (1 - BAR, ":")):
            axes.plot(ends, [factor * e for e in ends], style, color="gray", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=f"measured: {label}", ylabel="predicted")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=110)
