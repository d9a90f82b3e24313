"""Rows from anywhere: which global rows a rank needs, and the one `fetch` that brings them.

Stride, dilation, even kernels, pooling, padding, slicing, flip and roll are all the same mechanism with
other integers: from its own output rows a rank computes the spans of input rows that it needs (for
every rank, so that all ranks know what travels without asking), fetches exactly those, and computes on
them locally. Rows beyond the edge of the domain are the caller's to fill.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from lightning_shard.comm import Route, add_to_owners, exchange
from lightning_shard.domain import Subdomain
from lightning_shard.layout import partition

Span = tuple[int, int]  # global rows [low, high)
Needs = tuple[tuple[Span, ...], ...]  # for each rank of the group the spans it wants, in order


@lru_cache(maxsize=4096)
def route(extent: int, rank: int, needs: Needs) -> Route:
    """The route that brings `needs` from the canonical partition of `extent`, seen from `rank`."""
    ranks = len(needs)
    offsets = partition(extent, ranks)
    pieces = [  # of each rank's needs: (owner, low, high), in order
        [
            (owner, max(low, offsets[owner]), min(high, offsets[owner + 1]))
            for low, high in spans
            for owner in range(ranks)
            if max(low, offsets[owner]) < min(high, offsets[owner + 1])
        ]
        for spans in needs
    ]
    sends = tuple(
        tuple((low - offsets[rank], high - low) for owner, low, high in wanted if owner == rank)
        for wanted in pieces
    )
    receives: list[list[int]] = [[] for _ in range(ranks)]
    order = []
    for owner, low, high in pieces[rank]:
        order.append((owner, len(receives[owner])))
        receives[owner].append(high - low)
    moves = any(owner != peer for peer, wanted in enumerate(pieces) for owner, _, _ in wanted)
    return Route(sends, tuple(map(tuple, receives)), tuple(order), moves)


def fetch(x: Subdomain, dim: int, needs: Needs) -> Tensor:
    """The rows of `dim` that this rank needs, from whichever ranks hold them, in the order asked.

    Args:
        x: The split tensor; `dim` must be one factor, split.
        dim: The dim of the rows.
        needs: For each rank of the dim's group the spans of global rows it wants, all in range.
    """
    (factor,) = x.layout.dims[dim]
    grid = x.layout.grid
    plan = route(factor.extent, grid.index(factor.axes), needs)
    return exchange(x.local, dim, plan, x.domain.group(factor.axes))


def fetch_all(x: Subdomain, dim: int) -> Tensor:
    """All rows of `dim` on every rank."""
    (factor,) = x.layout.dims[dim]
    parts = x.layout.grid.parts(factor.axes)
    return fetch(x, dim, (((0, factor.extent),),) * parts)


def scatter_sum(x: Subdomain, dim: int, axes: tuple[int, ...]) -> Subdomain:
    """Add up the partial sums `x` of the ranks along `axes`; each keeps its canonical rows of `dim`.

    The adjoint of `fetch_all`, and a reduce-scatter.
    """
    grid, extent = x.layout.grid, x.shape[dim]
    layout = x.layout.with_dim(dim, extent, axes)
    plan = route(extent, grid.index(axes), (((0, extent),),) * grid.parts(axes))
    rows = layout.local_shape[dim]
    return x.like(add_to_owners(x.local, dim, rows, plan, x.domain.group(axes)), layout)


def needs_of(extent: int, parts: int, spans: Callable[[int, int], Sequence[Span]]) -> Needs:
    """What each rank needs for its rows of an output of `extent`: `spans(low, high)` says it.

    A rank without output rows needs nothing.
    """
    offsets = partition(extent, parts)
    return tuple(
        tuple(spans(low, high)) if high > low else ()
        for low, high in pairwise(offsets)
    )


@lru_cache(maxsize=4096)
def window_needs(
    extent: int, parts: int, output: int, kernel: int, stride: int, padding: int, dilation: int
) -> Needs:
    """The in-range input rows under the windows of each rank's output rows."""

    def spans(low: int, high: int) -> Sequence[Span]:
        first, last = window_span(low, high, kernel, stride, padding, dilation)
        first, last = max(first, 0), min(last, extent)
        return [(first, last)] if first < last else []

    return needs_of(output, parts, spans)


def window_span(low: int, high: int, kernel: int, stride: int, padding: int, dilation: int) -> Span:
    """The input rows under the windows of output rows `[low, high)`; may reach beyond the edges."""
    return low * stride - padding, (high - 1) * stride - padding + dilation * (kernel - 1) + 1


def empty_attached(shape: Sequence[int], *sources: Tensor | None) -> Tensor:
    """A tensor without elements that depends on `sources`.

    A rank without rows must still take part in every collective of the backward pass, and give each
    parameter a gradient (of zeros).
    """
    kept = [s for s in sources if s is not None]
    total = torch.stack([s.sum().to(kept[0].dtype) for s in kept]).sum()
    return total * kept[0].new_ones(tuple(shape))
