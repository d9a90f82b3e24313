"""Who owns which rows: a pure function of integers, which every rank computes alike."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.domain.layout import (
    Factor,
    Grid,
    Layout,
    merge,
    part_sizes,
    partition,
    splits_of,
)
from lightning_shard.domain.relayout import take_local
from tests.domain.grids import all_ranks, extent_of, extents, parts, sizes, split_dims


@given(extents, parts)
def test_parts_are_those_of_tensor_split(extent, parts):
    rows = torch.arange(extent)
    offsets = partition(extent, parts)
    split = rows.tensor_split(parts)
    assert [rows[low:high].tolist() for low, high in pairwise(offsets)] == [
        part.tolist() for part in split
    ]
    assert part_sizes(extent, parts) == [len(part) for part in split]
    assert max(part_sizes(extent, parts)) - min(part_sizes(extent, parts)) <= 1


def test_seven_rows_on_three_ranks():
    assert partition(7, 3) == (0, 3, 5, 7)
    assert part_sizes(2, 4) == [1, 1, 0, 0]  # more ranks than rows


@given(sizes)
def test_a_rank_is_counted_with_the_last_axis_fastest(sizes):
    axes = tuple(range(len(sizes)))
    assert [grid.index(axes) for grid in all_ranks(sizes)] == list(range(math.prod(sizes)))
    assert all(grid.parts(axes) == math.prod(sizes) for grid in all_ranks(sizes))


@given(sizes.flatmap(lambda s: st.tuples(st.just(s), split_dims(len(s)))))
def test_the_parts_of_all_ranks_are_the_whole_dim(case):
    """Ranks that differ along the axes of the dim hold each row once."""
    sizes, dim = case
    axes = {a for factor in dim for a in factor.axes}
    rows = torch.arange(extent_of(dim))
    held = []
    for grid in all_ranks(sizes):
        own = take_local(rows, 0, dim, grid)
        assert len(own) == Layout((dim,), grid).local_shape[0]
        if all(grid.coord[a] == 0 for a in range(len(sizes)) if a not in axes):
            held += own.tolist()
    assert sorted(held) == rows.tolist()


@given(sizes.flatmap(lambda s: st.tuples(st.just(s), split_dims(len(s)))))
def test_a_merged_dim_has_the_same_rows(case):
    sizes, dim = case
    merged = merge(dim)
    assert extent_of(merged) == extent_of(dim)
    assert len(merged) <= len(dim)
    assert merge(merged) == merged
    rows = torch.arange(extent_of(dim))
    for grid in all_ranks(sizes):
        assert take_local(rows, 0, merged, grid).equal(take_local(rows, 0, dim, grid))


@given(extents, extents, parts, st.integers(0, 5))
def test_a_dim_of_another_extent_is_split_canonically(extent, other, parts, rank):
    grid = Grid((parts,), (rank % parts,))
    layout = Layout.of((2, extent), {1: (0,)}, grid)
    changed = layout.with_dim(1, other)
    assert changed is Layout.of((2, other), {1: (0,)}, grid)  # equal layouts are one object
    assert changed.local_shape == (2, part_sizes(other, parts)[rank % parts])
    assert changed.with_dim(1, extent) == layout
    assert layout.with_dim(1, other, axes=()).split_dims == ()


def test_what_a_layout_says():
    grid = Grid((2, 3), (1, 0))
    layout = Layout.of((4, 5, 7), {1: (0,), 2: (1,)}, grid)
    assert layout.shape == (4, 5, 7)
    assert layout.local_shape == (4, 2, 3)
    assert layout.split_dims == (1, 2)
    assert layout.axes(2) == (1,)
    assert layout.axes() == (0, 1)
    assert layout.dim(-1) == 2
    assert str(layout) == "shape (4, 5, 7), dim 1 split over 2 ranks, dim 2 split over 3 ranks"
    assert str(layout.with_dims({1: (Factor(5),), 2: (Factor(7),)})).endswith("whole on every rank")
    with pytest.raises(IndexError, match=r"range of \[-3, 2\], but got 3"):
        layout.dim(3)


def test_which_axes_split_which_dims():
    assert splits_of(4, (2, 3), (2, 3)) == {2: (0,), 3: (1,)}
    assert splits_of(4, (2, 3), (-1, -2)) == {3: (0,), 2: (1,)}
    assert splits_of(2, (2, 3), (0, 0)) == {0: (0, 1)}
    assert splits_of(3, (4,), 1) == {1: (0,)}
    with pytest.raises(ValueError, match="one tensor dim for each of the 2 mesh axes"):
        splits_of(4, (2, 3), 2)
    with pytest.raises(ValueError, match="must lie in a tensor of 2 dims"):
        splits_of(2, (2,), 2)
    with pytest.raises(ValueError, match="a dim of its own, or all axes one dim"):
        splits_of(4, (2, 2, 2), (1, 1, 2))
