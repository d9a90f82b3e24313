"""What lies as channels_last in one process lies so on each rank, forward and backward.

Convolutions of a GPU are up to twice as fast so. A function that changed the format would make the
next one change it back, without a word.
"""

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from lightning_shard.domain.halo import overlapping
from lightning_shard.domain.memory import format_of
from tests.parity import mesh_of

IMAGE, VOLUME = (2, 6, 24, 8), (2, 6, 12, 4, 5)
WEIGHT, CUBE = torch.randn(6, 6, 3, 3), torch.randn(6, 6, 3, 3, 3)
SCALE, SHIFT = torch.randn(6), torch.randn(6)
CASES = {
    "convolution": lambda x: F.conv2d(x, WEIGHT, SHIFT, padding=1),
    "convolution, stride 2": lambda x: F.conv2d(x, WEIGHT, stride=2, padding=1),
    "convolution of fewer rows": lambda x: F.conv2d(x, WEIGHT, dilation=2),
    "transposed convolution": lambda x: F.conv_transpose2d(x, WEIGHT, stride=2, padding=1),
    "group norm": lambda x: F.group_norm(x, 2, SCALE, SHIFT),
    "group norm of one sample": lambda x: F.group_norm(x[:1], 3, SCALE, SHIFT),
    "batch norm": lambda x: F.batch_norm(x, None, None, SCALE, SHIFT, training=True),
    "batch norm of one sample": lambda x: F.batch_norm(x[:1], None, None, training=True),
    "relu": F.relu,
    "sum with a plain one": lambda x: x + SCALE[:, None, None],
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "mean pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest of other rows": lambda x: F.interpolate(x, scale_factor=1.5),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "joined channels": lambda x: torch.cat([x, x], 1),
    "zeros around": lambda x: F.pad(x, (1, 1, 1, 1)),
    "pixel shuffle": lambda x: F.pixel_shuffle(x[:, :4], 2),
    "roll": lambda x: x.roll(5, 2),
    "flip": lambda x: x.flip(2),
}
# the next function back brings the gradients of these into the format
RESULTS = {
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (7, 4)),
    "joined rows": lambda x: torch.cat([x, x], 2),
}
VOLUMES = {
    "convolution": lambda x: F.conv3d(x, CUBE, padding=1),
    "group norm": lambda x: F.group_norm(x, 2, SCALE, SHIFT),
    "batch norm": lambda x: F.batch_norm(x, None, None, SCALE, SHIFT, training=True),
    "max pool": lambda x: F.max_pool3d(x, 2),
    "trilinear": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
}


def formats(function, x, result_of=lambda y: y):
    """Those of the result and of the gradient that reaches `x`."""
    seen = []
    x.register_hook(lambda grad: seen.append(format_of(grad)))
    result = result_of(function(x))
    # a gradient that lies as the result does, as that of a later convolution would
    result.backward(torch.randn_like(result))
    return format_of(result), *seen


def keeps_its_format(function, whole, mode, kinds=("result", "gradient")):
    expected = formats(function, whole.clone().requires_grad_() * 1)
    local = lightning_shard.shard(whole, mesh_of(3), 2).to_local().requires_grad_() * 1

    def split(x):
        return function(lightning_shard.from_local(x, mesh_of(3), 2, whole.shape))

    with overlapping(mode):
        found = formats(split, local, lightning_shard.DomainTensor.to_local)
    last = torch.channels_last if whole.ndim == 4 else torch.channels_last_3d
    assert format_of(local) == last
    for kind, wanted, got in zip(kinds, expected, found, strict=False):
        assert wanted != last or got == last, kind


@pytest.mark.spmd(3)
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("name", CASES)
def test_images_stay_channels_last(name, mode):
    keeps_its_format(CASES[name], torch.randn(IMAGE).to(memory_format=torch.channels_last), mode)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", VOLUMES)
def test_volumes_stay_channels_last(name):
    whole = torch.randn(VOLUME).to(memory_format=torch.channels_last_3d)
    keeps_its_format(VOLUMES[name], whole, "auto")


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_channels_last(name):
    whole = torch.randn(IMAGE).to(memory_format=torch.channels_last)
    keeps_its_format(RESULTS[name], whole, "auto", ["result"])
