"""Moves rows between parts of any size and the canonical partition."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, product

import torch.distributed as dist
from torch import Tensor

from lightning_shard.domain.comm import exchange
from lightning_shard.domain.fetch import Segment, Span, route
from lightning_shard.domain.layout import Grid, partition
from lightning_shard.domain.local_group import gathered_objects, rank_in
from lightning_shard.domain.subdomain import Domain


def spans_of(sizes: Sequence[int]) -> list[Span]:
    """Return the global rows of parts of these sizes, one after the other."""
    return list(pairwise([0, *accumulate(sizes)]))


def exchange_rows(
    x: Tensor, dim: int, owned: Sequence[Span], wanted: Sequence[Span], group: dist.ProcessGroup
) -> Tensor:
    """Bring the global rows that this rank wants from the ranks that own them.

    Args:
        x: The rows that this rank owns, along `dim`.
        dim: The dim of the rows.
        owned: Global rows that each rank of the group owns; they do not overlap.
        wanted: Global rows that each rank gets, all owned by some rank.
        group: The ranks.
    """
    segments = [Segment(low, high, rank, 0) for rank, (low, high) in enumerate(owned) if low < high]
    source = tuple(sorted(segments, key=lambda s: s.low))
    needs = tuple(((low, high),) if low < high else () for low, high in wanted)
    return exchange(x, dim, route(source, rank_in(group), needs), group)


def to_canonical(
    local: Tensor, domain: Domain, splits: Mapping[int, tuple[int, ...]]
) -> tuple[Tensor, tuple[int, ...]]:
    """Move parts of any size to the canonical partition, and return the global shape, too.

    Args:
        local: This rank's part. Ranks at the same place along the axes that split a dim have as
            many rows of it.
        domain: The ranks.
        splits: The mesh axes that split each dim, counted from the front.

    Raises:
        ValueError: The parts do not make up a whole; raised on all ranks.
    """
    grid = domain.grid
    own = tuple(local.shape), str(local.dtype)
    parts = gathered_objects(own, domain.group(tuple(range(len(grid.sizes)))))
    shapes = [shape for shape, _ in parts]
    check_parts(shapes, [*splits])
    if len({dtype for _, dtype in parts}) > 1:
        raise ValueError(f"the ranks' parts have the dtypes {[dtype for _, dtype in parts]}.")
    shape = list(local.shape)
    for dim, axes in splits.items():
        sizes = _sizes_along(axes, dim, shapes, grid)
        shape[dim] = sum(sizes)
        canonical = list(pairwise(partition(shape[dim], len(sizes))))
        local = exchange_rows(local, dim, spans_of(sizes), canonical, domain.group(axes))
    return local, tuple(shape)


def check_parts(shapes: Sequence[tuple[int, ...]], dims: Sequence[int]) -> None:
    """Raise unless parts of these shapes differ along `dims` only."""
    whole = [tuple(-1 if d in dims else n for d, n in enumerate(s)) for s in shapes]
    if len(set(whole)) > 1:
        raise ValueError(
            f"the ranks' parts may differ along the split dims {tuple(dims)} only; their shapes "
            f"are {list(shapes)}."
        )


def _sizes_along(
    axes: tuple[int, ...], dim: int, shapes: Sequence[tuple[int, ...]], grid: Grid
) -> list[int]:
    """The rows of `dim` at each place along mesh axes, alike wherever else a rank is."""
    found: list[set[int]] = [set() for _ in range(grid.parts(axes))]
    for coord, shape in zip(product(*map(range, grid.sizes)), shapes, strict=True):
        found[Grid(grid.sizes, coord).index(axes)].add(shape[dim])
    if any(len(rows) > 1 for rows in found):
        raise ValueError(
            f"ranks at the same place along mesh axis {axes[0]} must hold as many rows of dim "
            f"{dim}; the ranks' shapes are {list(shapes)}."
        )
    return [rows.pop() for rows in found]
