"""Grids, dims and layouts for hypothesis, and every rank of a grid."""

import itertools
import math

from hypothesis import strategies as st

from lightning_shard.domain.layout import Dim, Factor, Grid

extents = st.integers(0, 17)
parts = st.integers(1, 6)
sizes = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)


def all_ranks(sizes: tuple[int, ...]) -> list[Grid]:
    """The grid as each of its ranks sees it, in the order of the ranks."""
    return [Grid(sizes, coord) for coord in itertools.product(*map(range, sizes))]


@st.composite
def split_dims(draw: st.DrawFn, axes: int) -> Dim:
    """A dim of one to three factors, of which at least one is split, each by an axis of its own."""
    count = draw(st.integers(1, 3))
    chosen = draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=min(axes, count)))
    names = draw(st.permutations(range(axes)))
    split = dict(zip(sorted(chosen), sorted(names[: len(chosen)]), strict=True))
    return tuple(
        Factor(draw(st.integers(1, 5)), (split[i],) if i in split else ()) for i in range(count)
    )


def extent_of(dim: Dim) -> int:
    return math.prod(factor.extent for factor in dim)
