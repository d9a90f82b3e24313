"""What a rank knows of the whole tensor does not depend on its own part.

Where torch gives a view on one rank and a copy on another, a write would reach a tensor there only.
So all ranks hold whole tensors that lie alike in memory, and know the same strides of split ones,
also a rank without rows, whose own strides say nothing.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_shard import DomainTensor, UnsupportedOperationError, gather, shard
from tests.pairs import choose
from tests.parity import assert_same, mesh_of

LAST = torch.channels_last
SHAPE = (2, 3, 2, 5)  # a third rank has no rows, of the samples neither
KERNEL = torch.linspace(-1, 1, 108, dtype=torch.float64).view(4, 3, 3, 3)
MATRIX = torch.eye(5, dtype=torch.float64) + 0.1

LAY = {
    "rows": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=LAST),
    "turned": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
}
CASES = {
    "gather": gather,
    "gather of a turned one": lambda x: gather(x.permute(0, 2, 3, 1)),
    "row": lambda x: x[:, :, 0],
    "sample": lambda x: x[0],
    "squeeze": lambda x: x[:, :, :1].squeeze(2),
    "convolution": lambda x: F.conv2d(x, KERNEL, padding=1),
    "convolution by channels last": lambda x: F.conv2d(x, LAY["channels last"](KERNEL), padding=1),
    "transposed convolution": lambda x: F.conv_transpose2d(x, KERNEL[:3, :, :2, :2], stride=2),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 3),
    "response norm": lambda x: F.local_response_norm(x, 2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
    "max pool": lambda x: F.max_pool2d(x, 2, 1),
    "max pool with gaps": lambda x: F.max_pool2d(x.repeat(1, 1, 4, 2), 2, 3),
    "zeros around": lambda x: F.pad(x, (1, 1, 1, 3)),
    "flip": lambda x: x.flip(2),
    "sort": lambda x: x.sort(2)[0],
    "solve": lambda x: torch.linalg.solve(MATRIX, x.movedim(2, -1)).flatten(2),
}


def told(fact):
    """The fact on each rank."""
    facts = [None] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return facts


def known_of(x):
    """Whether it is split, its strides, and whether a write into it is written back."""
    if isinstance(x, DomainTensor):
        return x.subdomain.strides, x.subdomain.copied is not None
    return [step for step, n in zip(x.stride(), x.shape, strict=True) if n > 1]


def field(shape=SHAPE):
    numbers = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return numbers.contiguous()


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", choose(CASES, every=2))
def test_ranks_know_the_same(name):
    for lay in LAY:
        for dim in (0, 2):
            x = shard(LAY[lay](field()), mesh_of(3), dim)
            try:
                result = CASES[name](x)
            except UnsupportedOperationError:
                result = x
            flat = result.flatten()
            facts = told((known_of(result), known_of(flat), result is x))
            assert facts[0] == facts[1] == facts[2], (lay, dim)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("lay", LAY)
def test_write_through_a_view_of_what_was_gathered(lay):
    """Which a rank without rows has made row by row, and where torch gives a copy."""

    def written(x):
        whole = gather(x)
        whole.flatten(1).add_(1)
        return whole

    x = LAY[lay](field())
    expected = x.clone()
    expected.flatten(1).add_(1)
    found = written(shard(x, mesh_of(3), 2))
    facts = told(found.tolist())
    assert facts[0] == facts[1] == facts[2]
    if lay != "turned":  # what is gathered lies row by row, or as channels_last
        assert_same(found, expected)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("rows", [2, 7])
def test_write_after_a_convolution_by_channels_last(rows):
    """`model.to(memory_format=torch.channels_last)` turns the weights alone.

    Of no rows nobody knows how the whole lies; then all ranks refuse the write.
    """

    def network(x):
        y = F.conv2d(x, LAY["channels last"](KERNEL), padding=1)
        flat = y.flatten(1)
        flat.relu_()
        return gather(y) if isinstance(y, DomainTensor) else y, flat

    x = field((2, 3, rows, 5))
    expected = network(x)
    try:
        found = network(shard(x, mesh_of(3), 2))
    except UnsupportedOperationError:
        found = None
    assert told(found is None) == [rows == 2] * 3
    if found is not None:
        assert_same(found[0], expected[0])
        assert_same(gather(found[1]), expected[1])
