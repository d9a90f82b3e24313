"""Neighbours of points, split or plain: the nearest ones, or all within a radius.

Each rank sorts its own points into cells and tells the others the boxes around them. It fetches the
cells of other ranks that its queries may reach and no more, the halo of its points, and compares
those. Pairs come in the order of one process, also where distances tie.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_shard.domain.align import local_part, subdomains
from lightning_shard.domain.comm import of_all
from lightning_shard.domain.layout import Factor, Grid, Layout, part_sizes
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.uneven import to_canonical
from lightning_shard.ops.registry import implements
from lightning_shard.ops.view.aligned import Operand, refuse_other_domains
from lightning_shard.ops.view.lookup import rows_named
from lightning_shard.points import cells
from lightning_shard.points.cells import Cells

Batch = Operand | None


def knn(
    x: Tensor, y: Tensor, k: int, batch_x: Tensor | None = None, batch_y: Tensor | None = None
) -> Tensor:
    """Find the `k` points of `x` that are nearest to each point of `y`, as torch_cluster.knn does.

    The points may be split over ranks, plain, or either. Ranks exchange the points near their
    boundaries only; points in the order of `curve_order` have few of them.

    Args:
        x: Points (N, D).
        y: Queries (M, D).
        k: Number of points for each query; fewer where its sample has fewer.
        batch_x: The number of the sample of each point (N,), 0 or more; all are of one by default.
        batch_y: The same of each query (M,).

    Returns:
        Pairs (2, E): the number of a query, and that of a point. They are sorted by query, then by
        distance, then by the point's number.

    Raises:
        ValueError: The shapes or dtypes do not fit, or the square of a coordinate is not finite.
    """
    tensors = [t for t in (x, y, batch_x, batch_y) if t is not None]
    if has_torch_function(tensors):
        return handle_torch_function(knn, tensors, x, y, k, batch_x, batch_y)
    return _plain(x, y, batch_x, batch_y, lambda q, p: cells.nearest_pairs(q, p, _whole(k)))


def radius(
    x: Tensor, y: Tensor, r: float, batch_x: Tensor | None = None, batch_y: Tensor | None = None
) -> Tensor:
    """Find all points of `x` within distance `r` of each point of `y`; none is left out.

    Args:
        x: Points (N, D).
        y: Queries (M, D).
        r: The greatest distance of a neighbour, in the unit of the coordinates.
        batch_x: The number of the sample of each point (N,), 0 or more; all are of one by default.
        batch_y: The same of each query (M,).

    Returns:
        Pairs (2, E): the number of a query, and that of a point. They are sorted by query, then by
        the point's number.

    Raises:
        ValueError: The shapes or dtypes do not fit, or the square of a coordinate is not finite.
    """
    tensors = [t for t in (x, y, batch_x, batch_y) if t is not None]
    if has_torch_function(tensors):
        return handle_torch_function(radius, tensors, x, y, r, batch_x, batch_y)
    return _plain(x, y, batch_x, batch_y, lambda q, p: cells.pairs_within(q, p, _length(r)))


Search = Callable[[Cells, Cells], Tensor]
Reach = Callable[[Cells, Cells, Cells, Tensor], Tensor]


def _plain(
    x: Tensor, y: Tensor, batch_x: Tensor | None, batch_y: Tensor | None, search: Search
) -> Tensor:
    _refuse_misfits(x, y, batch_x, batch_y)
    _refuse_infinite(bool(_is_finite(x) & _is_finite(y)))
    return search(_sorted(y, 0, batch_y), _sorted(x, 0, batch_x))


@implements(knn, checked=False)
def knn_of_parts(
    func: Search, x: Operand, y: Operand, k: int, batch_x: Batch = None, batch_y: Batch = None
) -> Subdomain:
    """Find the nearest points; points near the boundaries of the ranks' parts travel."""
    k = _whole(k)

    def reach(queries: Cells, own: Cells, outline: Cells, counts: Tensor) -> Tensor:
        return torch.minimum(
            cells.reach_of_nearest(queries, own, k),
            cells.reach_of_boxes(queries, outline, k, counts),
        )

    return _of_parts(x, y, batch_x, batch_y, reach, lambda q, p: cells.nearest_pairs(q, p, k))


@implements(radius, checked=False)
def radius_of_parts(
    func: Search, x: Operand, y: Operand, r: float, batch_x: Batch = None, batch_y: Batch = None
) -> Subdomain:
    """Find the points within a radius; points near the boundaries of the ranks' parts travel."""
    r = _length(r)

    def reach(queries: Cells, own: Cells, outline: Cells, counts: Tensor) -> Tensor:
        return queries.bounds.new_full((len(queries),), r)

    return _of_parts(x, y, batch_x, batch_y, reach, lambda q, p: cells.pairs_within(q, p, r))


def _of_parts(
    x: Operand, y: Operand, batch_x: Batch, batch_y: Batch, reach: Reach, search: Search
) -> Subdomain:
    """The pairs of this rank's queries, moved to the canonical partition of all pairs."""
    given = [t for t in (x, y, batch_x, batch_y) if t is not None]
    refuse_other_domains(*given)
    _refuse_misfits(x, y, batch_x, batch_y)
    owner = subdomains(given)[0]
    grid, domain = owner.layout.grid, owner.domain
    of_x, of_y = (t.layout.axes(0) if isinstance(t, Subdomain) else () for t in (x, y))
    of_y = of_y or of_x
    points, queries = _part(x, of_x, grid), _part(y, of_y, grid)
    everyone = domain.group(tuple(range(len(grid.sizes))))
    finite = (_is_finite(points) & _is_finite(queries)).view(1).to(torch.uint8)
    _refuse_infinite(bool(of_all(finite, everyone).all()))
    asking = _sorted(queries, _first_row(y, of_y, grid), _batch_part(batch_y, of_y, grid))
    most = max(part_sizes(x.shape[0], grid.parts(of_x)))
    own = _sorted(points, _first_row(x, of_x, grid), _batch_part(batch_x, of_x, grid), most)
    near = own
    if of_x:
        near = _fetched(asking, own, of_x, owner, reach, batch_x is not None)
    pairs = search(asking, near).mT.contiguous()
    pairs, shape = to_canonical(pairs, domain, {0: of_y} if of_y else {})
    return owner.like(pairs.mT, Layout.of(shape[::-1], {1: of_y}, grid))


def _fetched(
    asking: Cells,
    own: Cells,
    axes: tuple[int, ...],
    owner: Subdomain,
    reach: Reach,
    several_samples: bool,
) -> Cells:
    """The cells of all ranks along mesh axes that this rank's queries may reach."""
    domain, grid = owner.domain, owner.layout.grid
    group, parts = domain.group(axes), grid.parts(axes)

    def of_ranks(tensor: Tensor, dim: int) -> Tensor:
        return of_all(tensor.movedim(dim, 0).contiguous(), group).flatten(0, 1).movedim(0, dim)

    bounds, samples = of_ranks(own.bounds, 1), of_ranks(own.samples, 1)
    counts = of_ranks((own.numbers >= 0).sum(1), 0)
    total = parts * len(own)
    nothing = own.numbers.new_zeros(total, 0)
    outline = Cells(
        own.points.new_zeros(total, 0, own.points.shape[2]), nothing, nothing, bounds, samples
    )
    wanted = cells.cells_in_reach(asking, outline, reach(asking, own, outline, counts))
    wanted = wanted.nonzero().squeeze(1)

    def brought(tensor: Tensor) -> Tensor:
        table = Layout.of((total, *tensor.shape[1:]), {0: axes}, grid)
        return rows_named(owner.like(tensor, table), wanted, wanted[:0], _never)

    short = torch.int32 if total * own.numbers.shape[1] < 2**31 else torch.int64
    points, numbers = brought(own.points), brought(own.numbers.to(short)).long()
    batch = brought(own.batch) if several_samples else torch.zeros_like(numbers)
    return Cells(points, numbers, batch, bounds[:, wanted], samples[:, wanted])


def _never(value: int, place: int) -> Exception:
    return AssertionError(f"cell {value} is none")


def _sorted(points: Tensor, first: int, batch: Tensor | None, most: int | None = None) -> Cells:
    """Points in cells, numbered from `first` on; as many cells as `most` points take."""
    numbers = torch.arange(first, first + len(points), device=points.device)
    batch = torch.zeros_like(numbers) if batch is None else batch.long()
    return cells.cells_of(points.detach(), numbers, batch, *cells.cells_for(most or len(points)))


def _part(x: Operand, axes: tuple[int, ...], grid: Grid) -> Tensor:
    return local_part(x, Layout.of(x.shape, {0: axes}, grid)).detach()


def _batch_part(batch: Batch, axes: tuple[int, ...], grid: Grid) -> Tensor | None:
    return None if batch is None else _part(batch, axes, grid)


def _first_row(x: Operand, axes: tuple[int, ...], grid: Grid) -> int:
    return Factor(x.shape[0], axes).bounds(grid)[0]


def _whole(k: object) -> int:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a whole number of neighbours, 1 or more; got {k!r}.")
    return k


def _length(r: object) -> float:
    if isinstance(r, bool) or not isinstance(r, int | float) or not r >= 0:
        raise ValueError(f"r must be a distance, 0 or more; got {r!r}.")
    return float(r)


def _refuse_misfits(x: Operand, y: Operand, batch_x: Batch, batch_y: Batch) -> None:
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(
            f"points must be (N, D) and queries (M, D); got {[*x.shape]} and {[*y.shape]}."
        )
    if x.dtype != y.dtype or not x.dtype.is_floating_point:
        raise ValueError(
            f"points and queries must be of one floating dtype; got {x.dtype} and {y.dtype}."
        )
    for name, batch, of in (("batch_x", batch_x, x), ("batch_y", batch_y, y)):
        if batch is not None and (
            tuple(batch.shape) != (of.shape[0],) or batch.dtype.is_floating_point
        ):
            raise ValueError(
                f"{name} must be whole numbers, one for each of {of.shape[0]} points; got "
                f"{batch.dtype} of shape {[*batch.shape]}."
            )


def _is_finite(points: Tensor) -> Tensor:
    """Return True if the squares of all coordinates, and so all distances, are finite."""
    return (points.abs() < torch.finfo(points.dtype).max ** 0.5 / 4).all()


def _refuse_infinite(finite: bool) -> None:
    if not finite:
        raise ValueError(
            "a coordinate of the points or queries is not finite, or its square is not; remove "
            "that point, or choose another unit."
        )
