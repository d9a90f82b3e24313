"""A rank names the global rows that it needs; `fetch` brings them from the ranks that hold them.

Stride, dilation, even kernels, pooling, padding, slicing, flip and roll are one mechanism with
different integers. From its own output rows a rank computes the spans of input rows that it needs.
It computes those of the other ranks too, so that all ranks know what travels and none has to ask.
Then it fetches exactly its spans, and computes on them locally. Where a span reaches beyond the
edge of the domain, the caller fills the rows.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from lightning_shard.domain.comm import add_to_owners, exchange
from lightning_shard.domain.layout import Dim, Grid, partition
from lightning_shard.domain.memory_format import format_of
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.together import Route

Span = tuple[int, int]  # global rows [low, high)
Needs = tuple[tuple[Span, ...], ...]  # for each rank of the group the spans it wants, in order


@dataclass(frozen=True)
class Segment:
    """Global rows `[low, high)`, which rank `owner` holds from its local row `start` on."""

    low: int
    high: int
    owner: int
    start: int


@lru_cache(maxsize=1024)
def segments(factors: Dim, sizes: tuple[int, ...]) -> tuple[Segment, ...]:
    """Who holds which rows of a dim, in the order of the rows.

    A dim of one split factor has one segment for each rank; in a flattened product of dims the rows
    of a rank are scattered, one segment for each index of the factors before the last split one.

    Args:
        factors: The factors of the dim.
        sizes: The sizes of the mesh axes. Owners are counted along those that split the dim.
    """
    axes = tuple(sorted(a for f in factors for a in f.axes))
    last = max(i for i, f in enumerate(factors) if f.axes)
    strides = [math.prod(f.extent for f in factors[i + 1 :]) for i in range(len(factors))]
    found: list[Segment] = []
    for owner, coord in enumerate(itertools.product(*(range(sizes[a]) for a in axes))):
        place = dict(zip(axes, coord, strict=True))
        grid = Grid(sizes, tuple(place.get(a, 0) for a in range(len(sizes))))
        bounds = [f.bounds(grid) for f in factors]
        run = (bounds[last][1] - bounds[last][0]) * strides[last]
        rows = itertools.product(*(range(*b) for b in bounds[:last]))
        for i, index in enumerate(rows):
            low = sum(
                n * stride for n, stride in zip((*index, bounds[last][0]), strides, strict=False)
            )
            found.append(Segment(low, low + run, owner, i * run))
    return tuple(sorted((s for s in found if s.low < s.high), key=lambda s: s.low))


@lru_cache(maxsize=4096)
def route(source: tuple[Segment, ...], rank: int, needs: Needs) -> Route:
    """Plan the route that brings `needs` from the ranks that hold `source`, seen from `rank`."""
    lows = [s.low for s in source]

    def pieces(spans: tuple[Span, ...]) -> Iterator[tuple[int, int, int]]:
        """(owner, its local row, length) of what lies under `spans`, in order."""
        for low, high in spans:
            for s in source[max(bisect_right(lows, low) - 1, 0) : bisect_left(lows, high)]:
                first, end = max(low, s.low), min(high, s.high)
                if first < end:
                    yield s.owner, s.start + first - s.low, end - first

    wanted = [list(pieces(spans)) for spans in needs]
    sends = tuple(
        tuple((start, size) for owner, start, size in each if owner == rank) for each in wanted
    )
    receives: list[list[int]] = [[] for _ in needs]
    order: list[tuple[int, int]] = []
    for owner, _, size in wanted[rank]:
        order.append((owner, len(receives[owner])))
        receives[owner].append(size)
    moves = any(owner != peer for peer, each in enumerate(wanted) for owner, _, _ in each)
    return Route(sends, tuple(map(tuple, receives)), tuple(order), moves)


def route_of(x: Subdomain, dim: int, needs: Needs) -> Route:
    """Plan the route that brings `needs` of `dim` to the ranks that split it."""
    return _route_of(x.layout.dims[dim], x.layout.grid, needs)


@lru_cache(maxsize=4096)
def _route_of(factors: Dim, grid: Grid, needs: Needs) -> Route:
    axes = tuple(sorted(a for f in factors for a in f.axes))
    return route(segments(factors, grid.sizes), grid.index(axes), needs)


def fetch(x: Subdomain, dim: int, needs: Needs) -> Tensor:
    """Bring the rows of `dim` that this rank needs, from whichever ranks hold them, in that order.

    Args:
        x: The split tensor.
        dim: The dim of the rows, split.
        needs: Spans of global rows, all in range, that each rank of the dim's group wants.
    """
    found = exchange(x.local, dim, route_of(x, dim, needs), x.domain.group(x.layout.axes(dim)))
    wanted = x.memory_format
    if wanted == torch.contiguous_format or format_of(x.local) == wanted:
        return found
    return found.contiguous(memory_format=wanted)  # the own rows do not show how the whole lies


def fetch_to_read(x: Subdomain, dim: int, needs: Needs) -> Tensor:
    """Bring rows as `fetch` does, for a function that computes something new of them.

    Where each rank needs its own rows, they are `x.local` itself: a view would cost a copy in
    backward.
    """
    plan = route_of(x, dim, needs)
    mine = ((0, x.local.shape[dim]),)
    if not plan.moves and mine in plan.sends:
        return x.local
    return fetch(x, dim, needs)


def fetch_all(x: Subdomain, dim: int) -> Tensor:
    """Bring all rows of `dim` to every rank."""
    return fetch_alike(x, dim, (0, x.shape[dim]))


def fetch_alike(x: Subdomain, dim: int, rows: Span) -> Tensor:
    """Bring the same rows of `dim` to every rank, which lie in memory alike on all ranks.

    The parts may lie otherwise, as one without rows does. Then a view of the rows on one rank would
    be a copy on another.
    """
    parts = x.layout.grid.parts(x.layout.axes(dim))
    found = fetch(x, dim, ((rows,),) * parts)
    return found.contiguous(memory_format=x.memory_format) if parts > 1 else found


def scatter_sum(x: Subdomain, dim: int, axes: tuple[int, ...]) -> Subdomain:
    """Add up the partial sums `x` of the ranks along `axes`; each keeps its rows of `dim`.

    The adjoint of `fetch_all`, and a reduce-scatter.
    """
    grid, extent = x.layout.grid, x.shape[dim]
    layout = x.layout.with_dim(dim, extent, axes)
    everything: Needs = (((0, extent),),) * grid.parts(axes)
    plan = route(segments(layout.dims[dim], grid.sizes), grid.index(axes), everything)
    rows = layout.local_shape[dim]
    return x.like(add_to_owners(x.local, dim, rows, plan, x.domain.group(axes)), layout)


def needs_of(extent: int, parts: int, spans: Callable[[int, int], Sequence[Span]]) -> Needs:
    """List the input spans that each rank needs for its rows of an output of `extent` rows.

    `spans(low, high)` gives them for the output rows `[low, high)`.

    A rank without output rows needs nothing.
    """
    offsets = partition(extent, parts)
    return tuple(tuple(spans(low, high)) if high > low else () for low, high in pairwise(offsets))
