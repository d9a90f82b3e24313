"""Finds the pairs of a query and a point that are near, from points sorted into cells.

Points are halved along their widest dim until a cell has few of them (a k-d tree; Bentley, 1975).
A cell that is farther from a query's cell than the query reaches has no neighbour of it. So only
points of near cells are compared, each pair by the same kernel, whichever cells they lie in.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CELL = 32  # points of a cell, at most
_AT_ONCE = 2**23  # distances in memory
_SLACK = 1 + 1e-5  # so that the rounding of a distance hides no cell


@dataclass(frozen=True, eq=False)
class Cells:
    """Points in cells.

    Attributes:
        points: (cells, size, D).
        numbers: The points' numbers (cells, size); -1 where a cell has fewer points than others.
        batch: The sample of each point (cells, size); points of two samples are never near.
        bounds: The least and the greatest coordinates (2, cells, D); of an empty cell inf and -inf.
        samples: The first and the last sample in each cell (2, cells).
    """

    points: Tensor
    numbers: Tensor
    batch: Tensor
    bounds: Tensor
    samples: Tensor

    def __getitem__(self, cells: Any) -> "Cells":
        return Cells(
            self.points[cells],
            self.numbers[cells],
            self.batch[cells],
            self.bounds[:, cells],
            self.samples[:, cells],
        )

    def __len__(self) -> int:
        return len(self.points)


def cells_for(rows: int) -> tuple[int, int]:
    """Return the number of cells for so many points, and the most points of a cell."""
    count = 2 ** max(0, math.ceil(math.log2(max(rows, 1) / CELL)))
    return count, max(1, math.ceil(rows / count))


def cells_of(points: Tensor, numbers: Tensor, batch: Tensor, count: int, size: int) -> Cells:
    """Sort points (N, D) into `count` cells of `size` at most; `count` is a power of two."""
    order = _halved(points, batch, count, size)
    rows = torch.cat([points, points.new_zeros(1, points.shape[1])])[order]
    numbers = torch.cat([numbers, numbers.new_full((1,), -1)])[order]
    batch = torch.cat([batch, batch.new_zeros(1)])[order]
    empty, latest = order < 0, torch.iinfo(batch.dtype).max
    low, high = (rows.masked_fill(empty.unsqueeze(2), s * math.inf) for s in (1, -1))
    first, last = (batch.masked_fill(empty, s * latest) for s in (1, -1))
    bounds = torch.stack([low.amin(1), high.amax(1)])
    return Cells(rows, numbers, batch, bounds, torch.stack([first.amin(1), last.amax(1)]))


def _halved(points: Tensor, batch: Tensor, count: int, size: int) -> Tensor:
    """The rows of `points` in each cell (count, size), -1 at the end of cells with fewer."""
    places = points.double()
    width = (places.amax(0) - places.amin(0)).amax() if len(places) else 0.0
    places = torch.cat([places, (batch * (2 * width + 1)).unsqueeze(1)], 1)
    places = torch.cat([places, places.new_full((1, places.shape[1]), math.inf)])
    order = torch.full((count * size,), -1, device=points.device)
    order[: len(points)] = torch.arange(len(points), device=points.device)
    blocks = 1
    while blocks < count:
        order = order.view(blocks, -1)
        at = places[order]
        high = at.masked_fill((order < 0).unsqueeze(2), -math.inf).amax(1)
        widest = (high - at.amin(1)).nan_to_num(-1).argmax(1)
        along = at.gather(2, widest.view(-1, 1, 1).expand(-1, at.shape[1], 1)).squeeze(2)
        order = order.gather(1, along.argsort(dim=1, stable=True))
        blocks *= 2
    return order.view(count, size)


def cells_in_reach(queries: Cells, points: Cells, reach: Tensor) -> Tensor:
    """Mark the cells of points that some cell of queries may reach, by their boxes."""
    near = torch.zeros(len(points), dtype=torch.bool, device=reach.device)
    for own, at in _blocks(queries, len(points)):
        near |= _is_in_reach(_gaps(own, points), reach[at]).any(0)
    return near


def reach_of_boxes(queries: Cells, points: Cells, k: int, counts: Tensor) -> Tensor:
    """Return a distance for each cell of queries within which each query has `k` points.

    It follows from the boxes and the `counts` of their points alone, and is infinite where nothing
    follows from them.
    """
    found = [queries.bounds.new_zeros(0)]
    for own, _ in _blocks(queries, len(points)):
        far = (points.bounds.flip(0)[:, None] - own.bounds[:, :, None]).abs()
        far = torch.linalg.vector_norm(far.amax(0), dim=-1)
        one = own.samples[0] == own.samples[1]
        alike = (own.samples.mT[:, None] == points.samples.mT).all(2) & one[:, None]
        far, order = far.masked_fill(~alike, math.inf).sort(1)
        enough = counts[order].cumsum(1) >= k
        found.append(far.masked_fill(~enough, math.inf).amin(1))
    return torch.cat(found)


def reach_of_nearest(queries: Cells, points: Cells, k: int) -> Tensor:
    """Find distances as `reach_of_boxes` does, from the points that are here."""
    counts, found = (points.numbers >= 0).sum(1), [queries.bounds.new_zeros(0)]
    for own, _ in _blocks(queries, len(points)):
        found.append(_reach_of_first(own, points, _gaps(own, points), counts, k))
    return torch.cat(found)


def pairs_within(queries: Cells, points: Cells, radius: float) -> Tensor:
    """Find all pairs (2, E) of a query and a point at most `radius` away, by query, then point."""
    found = [queries.numbers.new_zeros(2, 0)]
    for own, _ in _blocks(queries, len(points)):
        gaps = _gaps(own, points)
        near = _is_in_reach(gaps, gaps.new_full((len(own),), radius))
        for some, numbers, distances in _compared(own, points, near):
            pairs = ((distances <= radius) & (distances < math.inf)).nonzero(as_tuple=True)
            found.append(_named(pairs, some, numbers))
    pairs = torch.cat(found, 1)
    return pairs[:, _in_order(pairs[0], pairs[1])]


def nearest_pairs(queries: Cells, points: Cells, k: int) -> Tensor:
    """Find the pairs (2, E) of each query with its `k` nearest points, by query, then distance.

    Of points at one distance that with the lower number comes first. A query with fewer points in
    its sample has fewer pairs.
    """
    counts = (points.numbers >= 0).sum(1)
    found, lengths = [queries.numbers.new_zeros(2, 0)], [queries.points.new_zeros(0)]
    for own, _ in _blocks(queries, len(points)):
        gaps = _gaps(own, points)
        reach = _reach_of_first(own, points, gaps, counts, k)
        for some, numbers, distances in _compared(own, points, _is_in_reach(gaps, reach)):
            last = _last(distances, k).unsqueeze(2)
            pairs = ((distances <= last) & (distances < math.inf)).nonzero(as_tuple=True)
            found.append(_named(pairs, some, numbers))
            lengths.append(distances[pairs])
    pairs = torch.cat(found, 1)
    order = _in_order(pairs[0], torch.cat(lengths), pairs[1])
    pairs = pairs[:, order]
    first = torch.searchsorted(pairs[0].contiguous(), pairs[0].contiguous())
    return pairs[:, torch.arange(pairs.shape[1], device=first.device) - first < k]


def _blocks(queries: Cells, cells: int) -> Iterator[tuple[Cells, slice]]:
    """The cells of queries, so many at a time that a table of their gaps to `cells` fits."""
    step = max(1, _AT_ONCE // max(1, cells * queries.points.shape[2]))
    for start in range(0, len(queries), step):
        at = slice(start, start + step)
        yield queries[at], at


def _gaps(queries: Cells, points: Cells) -> Tensor:
    """The least distance between points of two cells; infinite if they share no sample."""
    gap = torch.maximum(
        points.bounds[0] - queries.bounds[1, :, None], queries.bounds[0, :, None] - points.bounds[1]
    )
    apart = (points.samples[0] > queries.samples[1, :, None]) | (
        queries.samples[0, :, None] > points.samples[1]
    )
    length = torch.linalg.vector_norm(gap.clamp(min=0), dim=-1)
    return length.masked_fill(apart, math.inf)


def _is_in_reach(gaps: Tensor, reach: Tensor) -> Tensor:
    return (gaps <= reach.unsqueeze(1) * _SLACK) & (gaps < math.inf)


def _first(gaps: Tensor, counts: Tensor, k: int) -> Tensor:
    """The nearest cells that have `k` points together."""
    order = gaps.argsort(1)
    before = counts[order].cumsum(1) - counts[order]
    return torch.zeros_like(gaps, dtype=torch.bool).scatter(1, order, before < k) & (
        gaps < math.inf
    )


def _reach_of_first(queries: Cells, points: Cells, gaps: Tensor, counts: Tensor, k: int) -> Tensor:
    """Return a distance for each cell of queries within which each has `k` near points."""
    found = [gaps.new_zeros(0)]
    for some, _, distances in _compared(queries, points, _first(gaps, counts, k)):
        found.append(_last(distances, k).masked_fill(some.numbers < 0, -math.inf).amax(1))
    return torch.cat(found)


def _last(distances: Tensor, k: int) -> Tensor:
    """The distance of the `k`th nearest point to each query; infinite where there are fewer."""
    if distances.shape[2] < k:
        return distances.new_full(distances.shape[:2], math.inf)
    return distances.topk(k, largest=False).values[..., -1]


def _compared(
    queries: Cells, points: Cells, near: Tensor
) -> Iterator[tuple[Cells, Tensor, Tensor]]:
    """The distances between queries and points of the cells that are `near` them.

    Yields:
        Some cells of queries, the numbers (cells, C) of the points that they are compared with, and
        the distances (cells, size, C), infinite where there is no pair.
    """
    widths = near.sum(1)
    start = 0
    while start < len(queries):
        each = queries.points.shape[1] * points.points.shape[1]
        step = max(1, _AT_ONCE // max(1, each * int(widths[start:].amax())))
        at = slice(start, start + step)
        some, width = queries[at], int(widths[at].amax())
        is_near, cells = near[at].to(torch.uint8).topk(width, 1)
        theirs = points[cells]
        numbers = theirs.numbers.masked_fill(is_near.unsqueeze(2) == 0, -1).flatten(1)
        distances = torch.cdist(
            some.points, theirs.points.flatten(1, 2), compute_mode="donot_use_mm_for_euclid_dist"
        )
        alike = some.batch.unsqueeze(2) == theirs.batch.flatten(1).unsqueeze(1)
        alike &= (numbers >= 0).unsqueeze(1) & (some.numbers >= 0).unsqueeze(2)
        yield some, numbers, distances.masked_fill(~alike, math.inf)
        start += step


def _named(pairs: tuple[Tensor, ...], queries: Cells, numbers: Tensor) -> Tensor:
    cell, query, point = pairs
    return torch.stack([queries.numbers[cell, query], numbers[cell, point]])


def _in_order(*keys: Tensor) -> Tensor:
    """The order by the first key, then by the second, and so on."""
    order = torch.arange(len(keys[0]), device=keys[0].device)
    for key in reversed(keys):
        order = order[key[order].argsort(stable=True)]
    return order
