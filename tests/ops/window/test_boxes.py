"""Boxes of torchvision: pooled, suppressed."""

import pytest
import torch
from torchvision.ops import batched_nms, nms, roi_align

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import assert_parity, mesh_of

IMAGE = (2, 3, 12, 10)


def boxes(count=7):
    random = torch.Generator().manual_seed(2)
    corner = torch.rand(count, 2, generator=random, dtype=torch.float64) * 60
    size = torch.rand(count, 2, generator=random, dtype=torch.float64) * 40
    image = torch.arange(count).double()[:, None] % 2
    return torch.cat([image, corner, corner + size], 1)


def pool(x, corners):
    found = roi_align(x, boxes() + 0 * corners.detach(), (3, 2), 0.125, aligned=True)
    return found, roi_align(x, boxes(2), 2, 0.125, sampling_ratio=2)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("split", [{0: [2]}, {1: [0]}, {0: [3], 1: [0]}, {0: [0]}, {0: [1]}])
def test_pooled_boxes(split):
    if 0 not in split:
        assert_parity(lambda x, c: pool(x, c)[0], [IMAGE, (7, 5)], split, mesh_of(3))
    else:
        assert_parity(pool, [IMAGE, (7, 5)], split, mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("split", [{0: [2, 3]}, {0: [1, 2], 1: [0, 0]}, {0: [0, 1]}])
def test_pooled_boxes_on_two_axes(split):
    assert_parity(pool, [IMAGE, (7, 5)], split, mesh_of(2, 2))


@pytest.mark.spmd(3)
def test_pooled_boxes_whose_coordinates_are_split_are_refused():
    split = lightning_shard.shard(boxes(), mesh_of(3), 1)
    with pytest.raises(UnsupportedOperationError, match=r"roi_align.*coordinates"):
        roi_align(torch.zeros(IMAGE).double(), split, 2)


@pytest.mark.spmd(3)
def test_boxes_that_are_kept():
    corners = torch.cat([boxes(), boxes() + 1])[:, 1:]
    scores = torch.rand(14, generator=torch.Generator().manual_seed(1)).double()
    mesh = mesh_of(3)
    split = lightning_shard.shard(corners, mesh, 0), lightning_shard.shard(scores, mesh, 0)
    for given in ((split[0], scores), (corners, split[1]), split):
        assert torch.equal(nms(*given, 0.5), nms(corners, scores, 0.5))
    levels = torch.arange(14) % 3
    found = batched_nms(*split, lightning_shard.shard(levels, mesh, 0), 0.5)
    assert torch.equal(found, batched_nms(corners, scores, levels, 0.5))
    assert len(split[0][found]) == len(found)
