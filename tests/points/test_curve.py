"""Orders of points in which neighbours stand close together."""

import pytest
import torch

from lightning_shard import crossing_edges, curve_order


@pytest.mark.parametrize(("side", "dims"), [(16, 2), (8, 3), (4, 4), (9, 1)])
def test_the_curve_goes_from_neighbour_to_neighbour(side, dims):
    """On a grid of a power of two, each step is one cell long, and every cell is met once."""
    axes = [torch.arange(float(side))] * dims
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, dims)
    order = curve_order(points)
    assert torch.equal(order.sort().values, torch.arange(side**dims))
    steps = points[order].diff(dim=0).abs().sum(1)
    assert torch.equal(steps, torch.ones(side**dims - 1))


def test_points_in_one_place_keep_their_order():
    assert torch.equal(curve_order(torch.zeros(5, 3)), torch.arange(5))
    assert torch.equal(
        curve_order(torch.tensor([[2.0, 2], [1, 1], [1, 1]])), torch.tensor([1, 2, 0])
    )
    assert curve_order(torch.zeros(0, 2)).shape == (0,)


def test_few_edges_cross_along_the_curve():
    points = torch.rand(1000, 2, generator=torch.Generator().manual_seed(1))
    edges = torch.stack((torch.cdist(points, points) < 0.07).nonzero(as_tuple=True))
    place = curve_order(points).argsort()
    for ranks, most in ((2, 0.08), (4, 0.15)):
        before, after = (crossing_edges(e, 1000, ranks) for e in (edges, place[edges]))
        assert before > edges.shape[1] * (1 - 1 / ranks) * 0.9
        assert after < edges.shape[1] * most


def test_which_edges_cross():
    """Of five nodes on two ranks, the first rank holds three."""
    edges = torch.tensor([[0, 1, 2, 3, 4, 2], [1, 2, 3, 4, 0, 2]])
    assert crossing_edges(edges, 5, 2) == 2
    assert crossing_edges(edges, 5, 1) == 0
    assert crossing_edges(edges[:, :0], 5, 2) == 0


def test_crossing_edges_of_fewer_nodes_are_refused():
    edges = torch.tensor([[0, 5], [1, 2]])
    for nodes, ranks, words in ((5, 2, "more than 5.* got 5"), (6, 0, "ranks must be .* got 0")):
        with pytest.raises(ValueError, match=words):
            crossing_edges(edges, nodes, ranks)
    assert crossing_edges(edges, 6, 2) == 1
