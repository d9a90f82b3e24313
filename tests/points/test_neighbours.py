"""The nearest points and those within a radius, found as one process finds them from all pairs."""

import pytest
import torch

import lightning_shard
from lightning_shard import knn, radius
from lightning_shard.trainer.profile.traffic import counted
from tests.parity import mesh_of


def all_distances(x, y, batch_x, batch_y):
    distances = torch.cdist(y, x, compute_mode="donot_use_mm_for_euclid_dist")
    if batch_x is not None:
        distances = distances.masked_fill(batch_y[:, None] != batch_x, float("inf"))
    return distances


def nearest_of_all(x, y, k, batch_x=None, batch_y=None):
    lengths, places = all_distances(x, y, batch_x, batch_y).sort(dim=1, stable=True)
    is_there = lengths[:, :k] < float("inf")
    return torch.stack([is_there.nonzero()[:, 0], places[:, :k][is_there]])


def within_of_all(x, y, r, batch_x=None, batch_y=None):
    return (all_distances(x, y, batch_x, batch_y) <= r).nonzero().T


def drawn(seed):
    """Points, queries, their samples or None, a number of neighbours and a radius.

    Every third set lies on a grid, where most distances tie.
    """
    torch.manual_seed(seed)
    points, queries, dims = (int(torch.randint(*span, ())) for span in ((0, 700), (0, 300), (1, 5)))
    x, y = torch.rand(points, dims), torch.rand(queries, dims)
    if seed % 3 == 0:
        x, y = (x * 6).round(), (y * 6).round()
    if seed % 5 == 0:
        x, y = x.double(), y.double()
    batches = (torch.randint(0, 4, (points,)), torch.randint(0, 5, (queries,))) if seed % 2 else ()
    return x, y, batches, int(torch.randint(1, 40, ())), float(torch.rand(())) * (seed % 3 or 6) / 2


@pytest.mark.parametrize("seed", range(12))
def test_plain_points(seed):
    x, y, batches, k, r = drawn(seed)
    assert torch.equal(knn(x, y, k, *batches), nearest_of_all(x, y, k, *batches))
    assert torch.equal(radius(x, y, r, *batches), within_of_all(x, y, r, *batches))


def split_in_turn(tensors, mesh, turn):
    """Each tensor plain, or all axes on its rows, or the last axis on its coordinates."""
    ways = [[0] * mesh.ndim, [0] * (mesh.ndim - 1) + [1], None]
    found = []
    for place, tensor in enumerate(tensors):
        way = ways[(turn + place) % 3]
        if way is not None and tensor.ndim == 1:
            way = [0] * mesh.ndim
        found.append(tensor if way is None else lightning_shard.shard(tensor, mesh, way))
    return found


def compare(shape, seeds):
    mesh = mesh_of(*shape)
    for seed in seeds:
        x, y, batches, k, r = drawn(seed)
        expected = nearest_of_all(x, y, k, *batches), within_of_all(x, y, r, *batches)
        for turn in range(3):
            a, b, *c = split_in_turn((x, y, *batches), mesh, turn)
            for found, right in zip((knn(a, b, k, *c), radius(a, b, r, *c)), expected, strict=True):
                assert torch.equal(lightning_shard.gather(found), right), (seed, turn)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_two_ranks():
    compare((2,), range(9))


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_three_ranks():
    compare((3,), range(9))


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_two_by_two_ranks():
    compare((2, 2), range(9))


@pytest.mark.spmd(2)
def test_bytes():
    """In the order of a curve, only points near the boundary travel; else most of them do."""
    points = torch.rand(4000, 3, generator=torch.Generator().manual_seed(1))
    ordered = points[lightning_shard.curve_order(points)]
    for search in (lambda x: knn(x, x, 6), lambda x: radius(x, x, 0.05)):
        sent = []
        for whole in (points, ordered):
            split = lightning_shard.shard(whole, mesh_of(2), 0)
            with counted() as traffic:
                search(split)
            sent.append(traffic.bytes)
        assert sent[1] < sent[0] * 0.6


WRONG = {
    "shape": (lambda x: knn(x, x[:, :2], 3), r"points must be \(N, D\) and queries \(M, D\)"),
    "dtype": (lambda x: radius(x, x.double(), 0.1), "of one floating dtype"),
    "k": (lambda x: knn(x, x, 0), "k must be a whole number of neighbours, 1 or more; got 0"),
    "r": (lambda x: radius(x, x, -1.0), "r must be a distance, 0 or more; got -1.0"),
    "batch": (lambda x: knn(x, x, 3, x[:, 0]), "batch_x must be whole numbers, one for each of 9"),
    "nan": (lambda x: knn(torch.where(x == 24, torch.nan, x), x, 3), "is not finite"),
    "overflow": (lambda x: radius(x * 1e18, x * 1e18, 1.0), "or its square is not"),
    "inf": (lambda x: radius(x, torch.where(x == 0, torch.inf, x), 3), "is not finite"),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_on_one_rank_ends_all(name):
    call, words = WRONG[name]
    x = torch.arange(27.0).view(9, 3)
    for points in (x, lightning_shard.shard(x, mesh_of(3), 0)):
        with pytest.raises(ValueError, match=words):
            call(points)
