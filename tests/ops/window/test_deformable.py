"""Deformable convolutions: offsets of any size, on any split of images and offsets."""

import pytest
import torch
import torch.distributed as dist
from torchvision.ops import deform_conv2d

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import assert_parity, mesh_of

IMAGE = (2, 4, 9, 7)
WEIGHT = (6, 2, 3, 3)


def convolve(scale=1.0, **options):
    def run(x, weight, offset, mask, bias):
        return deform_conv2d(x, offset * scale, weight, bias, mask=mask.sigmoid(), **options)

    return run


def shapes(height, width, kernel=9, groups=2):
    places = (2, 2 * groups * kernel, height, width), (2, groups * kernel, height, width)
    return [IMAGE, WEIGHT, *places, WEIGHT[:1]]


SPLITS = {
    "all": {0: [2], 2: [2], 3: [2]},
    "image": {0: [2]},
    "offsets": {2: [2]},
    "otherwise": {0: [3], 2: [2], 3: [2]},
    "batch": {0: [0], 2: [0], 3: [0]},
    "batch and rows": {0: [0], 2: [2], 3: [2]},
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("split", SPLITS)
def test_split(split):
    assert_parity(convolve(padding=1), shapes(9, 7), SPLITS[split], mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 100.0])
def test_reach(scale):
    """Offsets that go nowhere, to the neighbours, and out of the image."""
    assert_parity(convolve(scale, padding=1), shapes(9, 7), SPLITS["all"], mesh_of(4))


@pytest.mark.spmd(3)
@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"stride": 2, "padding": 1}, (5, 4)),
        ({"stride": (3, 1), "padding": (0, 2)}, (3, 9)),
        ({"dilation": 2, "padding": 2}, (9, 7)),
        ({"dilation": (3, 1)}, (3, 5)),
        ({"padding": 4}, (15, 13)),
    ],
    ids=str,
)
def test_windows(options, size):
    for dim in (2, 3):
        split = {0: [dim], 2: [dim], 3: [dim]}
        assert_parity(convolve(**options), shapes(*size), split, mesh_of(3))


@pytest.mark.spmd(4)
def test_two_dims_and_no_mask():
    def run(x, weight, offset):
        return deform_conv2d(x, offset, weight, padding=1)

    split = {0: [2, 3], 2: [2, 3]}
    assert_parity(run, shapes(9, 7)[:3], split, mesh_of(2, 2))
    assert_parity(convolve(padding=1), shapes(9, 7), {0: [3, 2], 2: [2, 3]}, mesh_of(2, 2))


@pytest.mark.spmd(3)
def test_split_channels_are_refused():
    x = lightning_shard.shard(torch.randn(IMAGE), mesh_of(3), 1)
    with pytest.raises(UnsupportedOperationError, match=r"deform_conv2d.*split channels"):
        deform_conv2d(x, torch.zeros(2, 18, 7, 5), torch.zeros(6, 4, 3, 3))


@pytest.mark.spmd(3)
def test_gradients_of_weights_beside_nan_that_no_place_reads():
    """Nor do results that are computed beyond a rank's part read it."""
    x, weight = torch.randn(1, 2, 9, 5), torch.randn(3, 2, 1, 1)
    x[:, :, 8] = torch.nan
    offset = torch.zeros(1, 2, 9, 5)
    offset[:, 0, 1:] = -1.5
    found = []
    for given in (x, lightning_shard.shard(x, mesh_of(3), 2)):
        leaf = weight.clone().requires_grad_()
        result = lightning_shard.gather(deform_conv2d(given, offset, leaf))
        assert result.isfinite().all()
        found += torch.autograd.grad(result.sum(), leaf)
    dist.all_reduce(found[1])
    torch.testing.assert_close(found[1] / 3, found[0])
