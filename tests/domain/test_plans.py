"""Which rows travel: routes, needs of windows and halos, computed for all ranks and then played."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_shard.domain.fetch import needs_of, route, segments
from lightning_shard.domain.halo import halo_of, part_of
from lightning_shard.domain.layout import Factor, Grid, Layout, partition
from lightning_shard.domain.relayout import take_local
from lightning_shard.domain.together import Route
from lightning_shard.domain.window import per_dim, window_needs, window_span
from tests.domain.grids import all_ranks, extent_of, extents, parts, sizes, split_dims


def played(held: list[torch.Tensor], routes: list[Route]) -> list[torch.Tensor]:
    """Each rank's rows after the exchange that the routes of all ranks describe."""
    results = []
    for rank, own in enumerate(routes):
        came = {
            peer: [held[peer][start : start + size] for start, size in theirs.sends[rank]]
            for peer, theirs in enumerate(routes)
        }
        lengths = {peer: tuple(len(piece) for piece in pieces) for peer, pieces in came.items()}
        assert own.receives == tuple(lengths[peer] for peer in sorted(lengths))
        pieces = [came[peer][number] for peer, number in own.order]
        results.append(torch.cat(pieces) if pieces else held[rank][:0])
    return results


@st.composite
def wanted(draw: st.DrawFn) -> tuple:
    """A split dim, and for each rank of its group spans of rows that it wants."""
    mesh = draw(sizes)
    dim = draw(split_dims(len(mesh)))
    axes = tuple(sorted(a for factor in dim for a in factor.axes))
    extent = extent_of(dim)
    span = st.tuples(st.integers(0, extent), st.integers(0, extent)).map(lambda s: tuple(sorted(s)))
    ranks = [
        grid
        for grid in all_ranks(mesh)
        if all(grid.coord[a] == 0 for a in range(len(mesh)) if a not in axes)
    ]
    spans = st.lists(span.filter(lambda s: s[0] < s[1]), max_size=3).map(tuple)
    needs = tuple(draw(spans) if extent else () for _ in ranks)
    return dim, ranks, needs


@given(wanted())
def test_a_route_brings_each_rank_the_rows_that_it_wants(case):
    dim, ranks, needs = case
    rows = torch.arange(extent_of(dim))
    source = segments(dim, ranks[0].sizes)
    assert sorted(row for s in source for row in range(s.low, s.high)) == rows.tolist()
    routes = [route(source, rank, needs) for rank in range(len(ranks))]
    found = played([take_local(rows, 0, dim, grid) for grid in ranks], routes)
    for own, spans in zip(found, needs, strict=True):
        assert own.tolist() == [row for low, high in spans for row in range(low, high)]
    assert len({own.moves for own in routes}) == 1  # all ranks take part, or none
    crossing = any(
        peer != rank and own.sends[peer]
        for rank, own in enumerate(routes)
        for peer in range(len(ranks))
    )
    assert routes[0].moves == crossing


@given(extents, parts)
def test_a_rank_without_output_needs_nothing(extent, parts):
    needs = needs_of(extent, parts, lambda low, high: [(low, high)])
    assert needs == tuple(
        ((low, high),) if low < high else () for low, high in pairwise(partition(extent, parts))
    )


@given(
    extent=st.integers(1, 17), parts=parts, kernel=st.integers(1, 5), stride=st.integers(1, 4),
    padding=st.integers(0, 4), dilation=st.integers(1, 3),
)  # fmt: skip
def test_windows_need_the_rows_that_a_convolution_reads(
    extent, parts, kernel, stride, padding, dilation
):
    """Each rank convolves the rows that it needs, and zeros beyond the edges."""
    assume(extent + 2 * padding >= dilation * (kernel - 1) + 1)
    x = torch.rand(1, 1, extent, dtype=torch.float64)
    weight = torch.rand(1, 1, kernel, dtype=torch.float64)
    whole = F.conv1d(x, weight, stride=stride, padding=padding, dilation=dilation)
    output = whole.shape[-1]
    needs = window_needs(extent, parts, output, kernel, stride, padding, dilation)
    found = []
    for (low, high), spans in zip(pairwise(partition(output, parts)), needs, strict=True):
        if low == high:
            assert spans == ()
            continue
        first, last = window_span(low, high, kernel, stride, padding, dilation)
        rows = torch.zeros(1, 1, last - first, dtype=torch.float64)
        for start, end in spans:
            assert 0 <= start < end <= extent
            rows[..., start - first : end - first] = x[..., start:end]
        found.append(F.conv1d(rows, weight, stride=stride, dilation=dilation))
    torch.testing.assert_close(torch.cat(found, -1), whole)


def test_one_value_for_each_dim():
    assert per_dim(2, 3) == [2, 2, 2]
    assert per_dim((2,), 3) == [2, 2, 2]
    assert per_dim((1, 2, 3), 3) == [1, 2, 3]


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), mesh=st.tuples(parts, parts),
    before=st.integers(0, 3), after=st.integers(0, 3),
)  # fmt: skip
def test_a_halo_brings_the_rows_and_corners_around_a_part(rows, columns, mesh, before, after):
    """What the others send is what a rank waits for, and lies at the places that it names."""
    field = torch.arange(rows * columns).reshape(rows, columns)

    def around(extent: int, parts: int):
        return needs_of(
            extent, parts, lambda low, high: [(max(low - before, 0), min(high + after, extent))]
        )

    needs = ((0, around(rows, mesh[0])), (1, around(columns, mesh[1])))
    ranks = all_ranks(mesh)
    layouts = [
        Layout((((Factor(rows, (0,)),)), ((Factor(columns, (1,)),))), grid) for grid in ranks
    ]
    halos = [halo_of(layout, needs) for layout in layouts]
    for me, (layout, halo) in enumerate(zip(layouts, halos, strict=True)):
        offsets = [factor.bounds(layout.grid)[0] for (factor,) in layout.dims]
        spans = [wanted[layout.grid.coord[d]] for d, wanted in needs]
        seen = {
            (row - offsets[0], column - offsets[1])
            for low, high in spans[0]
            for row in range(low, high)
            for start, end in spans[1]
            for column in range(start, end)
        }
        own = set(_places(layout, layout.grid))
        for peer, box in enumerate(halo.receives):
            sent = halos[peer].sends[me]
            assert (sent is None) == (box is None)
            if box is None:
                continue
            part = field
            for d, (factor,) in enumerate(layouts[peer].dims):
                low, high = factor.bounds(layouts[peer].grid)
                part = part.narrow(d, low, high - low)
            values = part_of(part, halo.dims, sent)
            global_box = [(low + o, high + o) for (low, high), o in zip(box, offsets, strict=True)]
            assert values.equal(field[slice(*global_box[0]), slice(*global_box[1])])
            own |= {(i, j) for i in range(*box[0]) for j in range(*box[1])}
        if all(spans):
            assert seen <= own


def _places(layout: Layout, grid: Grid):
    (height, width) = layout.local_shape
    return ((i, j) for i in range(height) for j in range(width))
