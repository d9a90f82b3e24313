"""Windows slide over rows: each rank fetches and pads the rows that its own output needs.

Convolution, pooling and unfolding read `window_rows`; their transposes read `spread_rows`.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import one_factor
from lightning_shard.domain.fetch import Needs, Span, fetch_to_read, needs_of
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.memory_format import selected
from lightning_shard.domain.subdomain import Subdomain


def per_dim(value: int | Sequence[int], count: int) -> list[int]:
    """Return one value for each spatial dim."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def window_rows(
    x: Subdomain,
    dim: int,
    output: int,
    *,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int = 1,
    fill: float = 0.0,
    repeats: bool = False,
) -> Subdomain:
    """Bring the rows of split `dim` under this rank's windows, with `fill` beyond the edges.

    Args:
        x: The split tensor.
        dim: The dim of the rows.
        output: The rows of the output.
        kernel: The rows of a window.
        stride: From the first row of a window to that of the next.
        padding: The rows beyond each edge.
        dilation: From one row of a window to the next.
        fill: The value beyond the edges.
        repeats: True if a row beyond the first edge is instead a copy of the first row of its
            windows, which is what a maximum of equal values is taken from.

    Returns:
        The local rows, with the layout of the output in `dim`: a window function without padding
        gives exactly this rank's output rows. No rows where the rank has no output.
    """
    x = one_factor(x, dim)
    layout = x.layout.with_dim(dim, output)
    window = (kernel, stride, padding, dilation)
    needs, before, rows_and_edges = window_plan(x.shape[dim], layout, dim, window)
    rows = fetch_to_read(x, dim, needs)
    held = rows.shape[dim]
    after = rows_and_edges - before - held if rows_and_edges else 0
    if before or after:
        rows = with_edges(x, dim, rows, before, after, fill)
    if repeats and before:
        firsts = [(place - before) % dilation for place in range(before)]
        places = [before + n if n < held else place for place, n in enumerate(firsts)]
        places = [*places, *range(before, rows.shape[dim])]
        rows = selected(rows, dim, torch.tensor(places, device=rows.device))
    return x.like(rows, layout)


def with_edges(
    x: Subdomain, dim: int, rows: Tensor, before: int, after: int, fill: float | None
) -> Tensor:
    """Put rows of `fill` before and after rows of `x`; they lie as the whole, also around none."""
    found = F.pad(rows, [0, 0] * (x.ndim - dim - 1) + [before, after], value=fill)
    return found if rows.shape[dim] else found.contiguous(memory_format=x.memory_format)


@lru_cache(maxsize=4096)
def window_plan(
    extent: int, layout: Layout, dim: int, window: tuple[int, int, int, int]
) -> tuple[Needs, int, int]:
    """List the spans of input rows that each rank needs, and this rank's padding.

    Returns the needs, the rows beyond the first edge, and all rows with those beyond both edges.

    Args:
        extent: The input rows.
        layout: That of the output.
        dim: The dim of the rows.
        window: Its kernel, stride, padding and dilation.
    """
    (factor,) = layout.dims[dim]
    parts = layout.grid.parts(factor.axes)
    needs = window_needs(extent, parts, factor.extent, *window)
    low, high = factor.bounds(layout.grid)
    if low == high:
        return needs, 0, 0
    first, last = window_span(low, high, *window)
    return needs, max(min(-first, last - first), 0), last - first


@lru_cache(maxsize=4096)
def window_needs(
    extent: int, parts: int, output: int, kernel: int, stride: int, padding: int, dilation: int
) -> Needs:
    """Return the in-range input rows under the windows of each rank's output rows."""

    def spans(low: int, high: int) -> Sequence[Span]:
        first, last = window_span(low, high, kernel, stride, padding, dilation)
        first, last = max(first, 0), min(last, extent)
        return [(first, last)] if first < last else []

    return needs_of(output, parts, spans)


def window_span(low: int, high: int, kernel: int, stride: int, padding: int, dilation: int) -> Span:
    """Return the input rows under output rows `[low, high)`; they may reach beyond the edges."""
    return low * stride - padding, (high - 1) * stride - padding + dilation * (kernel - 1) + 1


def spread_rows(
    x: Subdomain,
    dim: int,
    output: int,
    *,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int = 1,
    fill: float = 0.0,
) -> tuple[Subdomain, int]:
    """Bring the rows of split `dim` whose windows reach this rank's part of `output` rows.

    Input row i spreads over output rows i * stride - padding + dilation * (0 ... kernel - 1). Rows
    beyond the edges are `fill`, so that the windows cover all of this rank's output rows.

    Returns:
        The local rows with the layout of the output in `dim`, and the place of this rank's first
        output row among all rows that they spread over. No rows where the rank has no output.
    """
    x = one_factor(x, dim)
    extent, grid = x.shape[dim], x.layout.grid
    layout = x.layout.with_dim(dim, output)
    (factor,) = layout.dims[dim]
    parts = grid.parts(factor.axes)
    window = (kernel, stride, padding, dilation)
    rows = fetch_to_read(x, dim, _needs(extent, parts, output, window))
    low, high = factor.bounds(grid)
    if low == high:
        return x.like(rows, layout), 0
    first, last = _reaching(low, high, *window)
    before = min(max(-first, 0), last - first)
    after = last - first - before - rows.shape[dim]
    if before or after:
        rows = with_edges(x, dim, rows, before, after, fill)
    return x.like(rows, layout), low - (first * stride - padding)


def _reaching(low: int, high: int, kernel: int, stride: int, padding: int, dilation: int) -> Span:
    """Input rows whose windows cover output rows `[low, high)`; may reach beyond the edges.

    Where stride exceeds the window there are output rows that no input reaches; the span then goes
    on to the next input row, so that they lie among the rows that it spreads over.
    """
    reach = dilation * (kernel - 1)
    top, bottom = low + padding, high - 1 + padding
    first = min(-((reach - top) // stride), top // stride)
    last = max(bottom // stride, -((reach - bottom) // stride))
    return first, last + 1


@lru_cache(maxsize=4096)
def _needs(extent: int, parts: int, output: int, window: tuple[int, int, int, int]) -> Needs:
    def spans(low: int, high: int) -> list[Span]:
        first, last = _reaching(low, high, *window)
        first, last = max(first, 0), min(last, extent)
        return [(first, last)] if first < last else []

    return needs_of(output, parts, spans)
