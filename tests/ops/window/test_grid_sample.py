import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_shard
from lightning_shard.domain.errors import UnsupportedOperationError
from tests import OLDEST
from tests.parity import (
    assert_double_backward,
    assert_parity,
    assert_parity_of_module,
    mesh_of,
    tiles_of,
)

IMAGE, GRID = (2, 3, 7, 5), (2, 6, 4, 2)
MODES = [*itertools.product(["bilinear", "nearest", "bicubic"], ["zeros", "border", "reflection"])]


def sample(mode="bilinear", padding="zeros", align_corners=False):
    return lambda x, g: F.grid_sample(x, g, mode, padding, align_corners)


@pytest.mark.quick_rows(
    "bilinear-zeros-False",
    "bilinear-reflection-True",
    "nearest-border-False",
    "nearest-reflection-True",
    "bicubic-border-False",
)
@pytest.mark.spmd(3)
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("modes", MODES, ids="-".join)
def test_modes(modes, align_corners):
    function = sample(*modes, align_corners)
    assert_parity(function, [IMAGE, GRID], {0: [2], 1: [1]}, mesh_of(3))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_plain_grid(dim):
    assert_parity(sample(), [IMAGE, GRID], {0: [dim]}, mesh_of(3))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_plain_image(dim):
    assert_parity(sample(), [IMAGE, GRID], {1: [dim]}, mesh_of(3))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (1, 2), (2, 2), (3, 1)])
def test_both_split(dims):
    assert_parity(sample(), [IMAGE, GRID], {0: [dims[0]], 1: [dims[1]]}, mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("grid_dims", [None, (1, 2), (2, 1), (0, 1)])
@pytest.mark.parametrize("dims", [(2, 3), (0, 3)])
def test_two_by_two(dims, grid_dims):
    split = {0: dims} if grid_dims is None else {0: dims, 1: grid_dims}
    assert_parity(sample(), [IMAGE, GRID], split, mesh_of(2, 2))


@pytest.mark.spmd(4)
def test_volumes_and_tiny_extents():
    shapes = [(2, 3, 5, 4, 3), (2, 4, 3, 6, 3)]
    assert_parity(sample(), shapes, {0: [2, 4], 1: [3, 1]}, mesh_of(2, 2))
    assert_parity(sample(), [(2, 3, 2, 5), (2, 3, 4, 2)], {0: [2], 1: [1]}, mesh_of(4))


@pytest.mark.spmd(3)
def test_affine_grid_of_a_split_batch():
    function = lambda theta: F.affine_grid(theta, [4, 3, 5, 6], align_corners=False)  # noqa: E731
    assert_parity(function, [(4, 2, 3)], {0: [0]}, mesh_of(3))


class Transformer(nn.Module):
    """A spatial transformer: it looks at the image and turns it."""

    def __init__(self):
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.turn = nn.Linear(4, 6)

    def forward(self, x):
        theta = self.turn(self.look(x)).view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, x.size(), False), align_corners=False)


@pytest.mark.spmd(3)
def test_spatial_transformer():
    assert_parity_of_module(Transformer().double(), IMAGE, [2], mesh_of(3))


@pytest.mark.skipif(OLDEST, reason="torch 2.11 has no second derivative of grid_sample")
@pytest.mark.spmd(3)
def test_second_gradients_on_a_rank_without_rows():
    for mesh in (mesh_of(3), tiles_of(3)):
        assert_double_backward(sample(), [(1, 2, 2, 3), (1, 2, 3, 2)], {0: [2], 1: [1]}, mesh)


@pytest.mark.spmd(3)
def test_refusals():
    x, grid = torch.randn(IMAGE), torch.randn(GRID)
    with pytest.raises(UnsupportedOperationError, match="split coordinates"):
        F.grid_sample(x, lightning_shard.shard(grid, mesh_of(3), 3), align_corners=False)
    with pytest.raises(RuntimeError, match="same batch size"):
        F.grid_sample(lightning_shard.shard(x, mesh_of(3), 2), grid[:1], align_corners=False)
    with pytest.raises(ValueError, match="expected mode to be"):
        F.grid_sample(lightning_shard.shard(x, mesh_of(3), 2), grid, "trilinear")
