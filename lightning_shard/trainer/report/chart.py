"""Draws lines as SVG by matplotlib, which the extra `pictures` installs."""

import importlib.util
import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

Points = Sequence[tuple[float, float]]

COLORS = ("#1f5fa8", "#c8541a", "#2d7f4f", "#7a4fa3", "#8c6d1f", "#555555")
# fewer than colors, so that many lines differ
DASHES: tuple[Any, ...] = ("-", (0, (7, 3)), (0, (2, 3)), (0, (9, 3, 2, 3)), (0, (4, 4)))
LOGARITHMIC = 30.0  # ratio of the largest value to the smallest from which on the axis is so
INCHES, LEGEND_INCHES = (6.4, 2.9), 0.19  # the legend takes so much more for each line


def missing() -> str:
    """Return the sentence for a page without charts if matplotlib is not installed, else ""."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return (
        "No curves are drawn, because the package matplotlib is not installed; "
        "pip install 'lightning-shard[pictures]' installs it."
    )


def chart(lines: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """Draw lines of points (x, y), with their names below the axes; only finite points are drawn.

    The vertical axis is logarithmic if the values are positive and differ by a factor above 30.

    Args:
        lines: The points of each line, by its name.
        x_label: The quantity on the horizontal axis.
        y_label: The quantity on the vertical axis.

    Returns:
        An `svg` element; an empty text if there is no point to draw.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; see `missing`.
    """
    finite = {
        name: [p for p in points if all(map(math.isfinite, p))] for name, points in lines.items()
    }
    shown = {name: points for name, points in finite.items() if points}
    if not shown:
        return ""
    import matplotlib as mpl

    # the salt makes the names in one picture differ from those in another of the same page
    options: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": repr(lines),
        "font.family": "sans-serif",
    }
    with mpl.rc_context(options):
        figure = _figure(shown, x_label, y_label)
        written = io.StringIO()
        unknown = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=unknown)
    text = written.getvalue()
    element = text[text.index("<svg") :].rstrip()
    # names such as "axes_1", to which nothing refers, would stand in each picture of a page
    element = re.sub(r' id="[A-Za-z0-9.]+_[0-9]+"', "", element)
    return element.replace("<svg", f'<svg role="img" aria-label="{escape(y_label)}"', 1)


def _figure(lines: Mapping[str, Points], x_label: str, y_label: str) -> Any:
    from matplotlib.figure import Figure

    wide, high = INCHES
    figure = Figure((wide, high + LEGEND_INCHES * len(lines)), layout="constrained")
    axes: Any = figure.subplots()
    styles = zip(cycle(COLORS), cycle(DASHES))
    for points, (color, dash) in zip(lines.values(), styles, strict=False):
        marker = "o" if len(points) == 1 else ""
        axes.plot(*zip(*points, strict=True), color=color, linestyle=dash, marker=marker)
    values = [y for points in lines.values() for _, y in points]
    is_log = min(values) > 0 and max(values) / min(values) > LOGARITHMIC
    axes.set_yscale("log" if is_log else "linear")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(visible=True, axis="y", color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(x_label, parse_math=False)
    axes.set_ylabel(f"{y_label} (log)" if is_log else y_label, parse_math=False)
    # the names come after the legend is made, which would skip those that begin with "_"
    places = list(map(str, range(len(lines))))
    legend = figure.legend(axes.lines, places, loc="outside lower center", frameon=False)
    for name, entry in zip(lines, legend.get_texts(), strict=True):
        entry.set_parse_math(False)
        entry.set_text(name)
    return figure
