"""What lies as channels_last in one process lies so on each rank, forward and backward.

Convolutions of a GPU are up to twice as fast so. A function that changed the format would make the
next one change it back, without a word.
"""

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from lightning_shard.domain.halo import overlapping
from lightning_shard.domain.memory_format import format_of
from tests.pairs import choose
from tests.parity import mesh_of

IMAGE, VOLUME = (2, 6, 25, 8), (2, 6, 12, 4, 5)
WEIGHT, CUBE, SCALE, SHIFT = (
    torch.randn(shape, dtype=torch.float64) for shape in ((6, 6, 3, 3), (6, 6, 3, 3, 3), 6, 6)
)
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


def of_part(whole):
    """This rank's rows, in memory of their own."""
    return lightning_shard.shard(whole, mesh_of(3), 2).to_local()


def tried(function, x, seed_of):
    """The result, and the gradient that reaches `x`, which nothing brings into a format."""
    seen = []
    x.register_hook(seen.append)
    result = function(x)
    result.backward(seed_of(result))
    return result.detach(), *seen


def keeps_its_format(function, whole, mode, kinds=("result", "gradient")):
    last = torch.channels_last if whole.ndim == 4 else torch.channels_last_3d
    seeds = []

    def seed_of(result):
        seeds.append(torch.randn_like(result))  # in its format, as of a later convolution
        return seeds[0]

    expected = tried(function, whole.clone().requires_grad_() * 1, seed_of)

    def split(x):
        return function(lightning_shard.from_local(x, mesh_of(3), 2, whole.shape)).to_local()

    local = of_part(whole).requires_grad_() * 1
    assert format_of(local) == last
    with overlapping(mode):
        found = tried(split, local, lambda result: of_part(seeds[0]))
    for wanted, got in zip(expected, found, strict=True):
        torch.testing.assert_close(got, of_part(wanted))
    for kind, wanted, got in zip(kinds, expected, found, strict=False):
        assert format_of(wanted) != last or format_of(got) == last, kind


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("name", "mode"), choose(CASES, ["always", "never"]))
def test_images_stay_channels_last(name, mode):
    keeps_its_format(
        CASES[name],
        torch.randn(IMAGE, dtype=torch.float64).to(memory_format=torch.channels_last),
        mode,
    )


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", VOLUMES)
def test_volumes_stay_channels_last(name):
    whole = torch.randn(VOLUME, dtype=torch.float64).to(memory_format=torch.channels_last_3d)
    keeps_its_format(VOLUMES[name], whole, "auto")


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_channels_last(name):
    whole = torch.randn(IMAGE, dtype=torch.float64).to(memory_format=torch.channels_last)
    keeps_its_format(RESULTS[name], whole, "auto", ["result"])


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", ["batch norm", "group norm", "group norm of one sample"])
def test_rows_of_one_value(name):
    """As of land: on some ranks a channel varies, on others it does not."""
    whole = torch.randn(IMAGE, dtype=torch.float64)
    whole[:, :2, :9], whole[:, 2:4] = 3.0, 7.0
    keeps_its_format(CASES[name], whole.to(memory_format=torch.channels_last), "auto")


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", ["batch norm of one sample", "group norm of one sample"])
def test_values_far_from_zero(name):
    """Where torch's own norm of channels_last tensors is wrong by a twentieth."""
    whole = torch.randn(IMAGE) + 100
    exact, weights = CASES[name](whole.double()), (SCALE, SHIFT)
    split = lightning_shard.shard(whole.to(memory_format=torch.channels_last), mesh_of(3), 2)
    if name.startswith("group"):
        found = F.group_norm(split[:1], 3, *(w.float() for w in weights))
    else:
        found = F.batch_norm(split[:1], None, None, training=True)
    torch.testing.assert_close(lightning_shard.gather(found), exact.float(), rtol=1e-4, atol=1e-4)
