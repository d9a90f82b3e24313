import functools
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_shard
from lightning_shard.domain.errors import UnsupportedOperationError
from tests.pairs import choose
from tests.parity import assert_parity, assert_parity_of_module, mesh_of

IMAGE, VOLUME = (2, 3, 13, 9), (2, 3, 7, 5, 6)


def ties(function):
    """Few distinct values, so that the first of equal maxima must be found."""
    return lambda x: function(x.round())


def hidden(x, least):
    """Infinite where a mask hides it; the gradient is that of the first of equal values."""
    return x + torch.zeros_like(x.detach()).masked_fill(x.detach() < least, -inf)


CASES = {
    "max": (lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE),
    "max_overlap": (lambda x: F.max_pool2d(x, 5, 1, 2), IMAGE),
    "max_gaps": (lambda x: F.max_pool2d(x, 2, 3), IMAGE),
    "max_dilated": (lambda x: F.max_pool2d(x, 3, 2, 1, 2), IMAGE),
    "max_ceil": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), IMAGE),
    "max_ceil_gaps": (lambda x: F.max_pool2d(x, 2, 4, 1, ceil_mode=True), IMAGE),
    "max_of_nothing": (lambda x: F.max_pool2d(hidden(x, 2), 3, 2, 1), IMAGE),
    "max_of_nothing_indices": (
        lambda x: F.max_pool2d(hidden(x, 1), 4, 3, 2, 2, True, return_indices=True),
        IMAGE,
    ),
    "max_per_dim": (lambda x: F.max_pool2d(x, (2, 3), (3, 1), (1, 0)), IMAGE),
    "max_volume": (lambda x: F.max_pool3d(x, 2, 2, 1), VOLUME),
    "max_indices": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), IMAGE),
    "max_indices_ceil": (lambda x: F.max_pool2d(x, 3, 2, 0, 2, True, return_indices=True), IMAGE),
    "max_indices_ties": (ties(lambda x: F.max_pool2d(x, 4, 3, 2, return_indices=True)), IMAGE),
    "max_indices_volume": (lambda x: F.max_pool3d(x, 3, 2, 1, return_indices=True), VOLUME),
    "avg": (lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE),
    "avg_default": (lambda x: F.avg_pool2d(x, 3), IMAGE),
    "avg_without_pad": (lambda x: F.avg_pool2d(x, 3, 2, 1, False, False), IMAGE),
    "avg_ceil": (lambda x: F.avg_pool2d(x, 4, 3, 2, True), IMAGE),
    "avg_ceil_without_pad": (lambda x: F.avg_pool2d(x, 4, 3, 2, True, False), IMAGE),
    "avg_divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, False, 7), IMAGE),
    "avg_per_dim": (lambda x: F.avg_pool2d(x, (2, 3), (3, 1), (1, 0)), IMAGE),
    "avg_volume": (lambda x: F.avg_pool3d(x, 3, 2, 1, True, False), VOLUME),
    "lp": (lambda x: F.lp_pool2d(x.abs(), 3.0, 3, 2), IMAGE),
    "lp_ceil": (lambda x: F.lp_pool2d(x.abs(), 1.5, (2, 3), None, True), IMAGE),
    "lp_infinite": (lambda x: F.lp_pool2d(x, float("inf"), 3), IMAGE),
    "lp_volume": (lambda x: F.lp_pool3d(x, 2.0, 2), VOLUME),
    "adaptive_avg": (lambda x: F.adaptive_avg_pool2d(x, (5, 4)), IMAGE),
    "adaptive_avg_1": (lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE),
    "adaptive_avg_none": (lambda x: F.adaptive_avg_pool2d(x, (None, 2)), IMAGE),
    "adaptive_avg_volume": (lambda x: F.adaptive_avg_pool3d(x, (4, 2, 9)), VOLUME),
    "adaptive_max": (lambda x: F.adaptive_max_pool2d(x, (5, 4)), IMAGE),
    "adaptive_max_1": (lambda x: F.adaptive_max_pool2d(x, 1), IMAGE),
    "adaptive_max_2": (lambda x: F.adaptive_max_pool2d(x, (2, 4), return_indices=True), IMAGE),
    "adaptive_max_more": (lambda x: F.adaptive_max_pool2d(x, (17, 11), True), IMAGE),
    "adaptive_max_none": (lambda x: F.adaptive_max_pool2d(x, (None, 2), True), IMAGE),
    "adaptive_max_ties": (ties(lambda x: F.adaptive_max_pool2d(x, (5, 4), True)), IMAGE),
    "adaptive_max_ties_1": (ties(lambda x: F.adaptive_max_pool2d(x, (1, 2), True)), IMAGE),
    "adaptive_max_volume": (lambda x: F.adaptive_max_pool3d(x, (4, 2, 9), True), VOLUME),
}
SMOOTH = ["max", "avg_ceil", "lp_ceil", "adaptive_avg", "adaptive_max_2"]


@pytest.mark.spmd(4)
@pytest.mark.parametrize("case", ["max_indices", "avg_ceil_without_pad", "lp", "adaptive_max_2"])
def test_split_batch_and_columns(case):
    function, shape = CASES[case]
    assert_parity(function, [shape], {0: [0, 3]}, mesh_of(2, 2))


LINES = {
    "max": (lambda x: F.max_pool1d(x, 3, 2, 1), (3, 7)),
    "max_batch": (lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), (2, 3, 7)),
    "max_tiny": (lambda x: F.max_pool1d(x, 3, 1, 1, return_indices=True), (3, 3)),
    "max_one": (lambda x: F.max_pool1d(x, 3, return_indices=True), (3, 3)),
    "max_function": (lambda x: torch.max_pool1d(x, 2), (3, 7)),
    "avg": (lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), (3, 7)),
    "avg_tiny": (lambda x: F.avg_pool1d(x, 2), (2, 3, 5)),
    "lp": (lambda x: F.lp_pool1d(x, 2.0, 3, 2), (2, 3, 7)),
    "adaptive_avg": (lambda x: F.adaptive_avg_pool1d(x, 3), (3, 9)),
    "adaptive_avg_tiny": (lambda x: F.adaptive_avg_pool1d(x, 5), (3, 2)),
    "adaptive_max": (lambda x: F.adaptive_max_pool1d(x, 3), (3, 9)),
    "adaptive_max_tiny": (lambda x: F.adaptive_max_pool1d(x, 5, return_indices=True), (3, 2)),
    "adaptive_max_few": (lambda x: F.adaptive_max_pool1d(x, 2, return_indices=True), (3, 3)),
    "adaptive_max_one": (ties(lambda x: F.adaptive_max_pool1d(x, 1, True)), (2, 3, 11)),
}


@pytest.mark.spmd(4)
@pytest.mark.parametrize("case", choose(LINES, every=2))
def test_lines(case):
    function, shape = LINES[case]
    assert_parity(function, [shape], {0: [len(shape) - 1]}, mesh_of(4))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("case", ["max", "avg_without_pad", "lp", "adaptive_avg", "adaptive_max"])
def test_single_precision(case):
    function, shape = CASES[case]
    assert_parity(function, [shape], {0: [2]}, mesh_of(3), dtype=torch.float32)


def unpool(count, *window, size=None, ceil_mode=False):
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[count - 1]
    back = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)[count - 1]

    def function(x):
        values, indices = pool(x, *window, ceil_mode=ceil_mode, return_indices=True)
        return back(values * 2, indices, *window, output_size=size)

    return function


UNPOOLED = {
    "image": (unpool(2, 2), (2, 3, 12, 8)),
    "overlap": (unpool(2, 3, 2, 1), (2, 3, 13, 9)),
    "size": (unpool(2, 2, size=(13, 9)), (2, 3, 13, 9)),
    "ceil": (unpool(2, 2, size=(2, 3, 13, 9), ceil_mode=True), (2, 3, 13, 9)),
    "gaps": (unpool(2, 2, 3, size=(13, 9)), (2, 3, 13, 9)),
    "unbatched": (unpool(2, 2), (3, 8, 12)),
    "line": (unpool(1, 2), (2, 3, 12)),
    "tiny": (unpool(1, 2, size=(5,)), (3, 5)),
    "volume": (unpool(3, 2), (2, 3, 6, 4, 8)),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("case", "dim"), choose(UNPOOLED, [-1, -2]))
def test_unpool(case, dim):
    function, shape = UNPOOLED[case]
    assert_parity(function, [shape], {0: [dim]}, mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("case", choose(UNPOOLED, every=2))
def test_unpool_two_by_two(case):
    function, shape = UNPOOLED[case]
    assert_parity(function, [shape], {0: [-2, -1]}, mesh_of(2, 2))


class PoolAndBack(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.back = nn.MaxUnpool2d(2)

    def forward(self, x):
        values, indices = self.pool(x)
        return self.back(values, indices, output_size=x.size())


MODULES = {
    "pool_and_back": PoolAndBack,
    "max": lambda: nn.MaxPool2d(3, 2, 1),
    "avg": lambda: nn.AvgPool2d(3, 2, 1),
    "lp": lambda: nn.LPPool2d(2, 3),
    "adaptive_max": lambda: nn.AdaptiveMaxPool2d((5, 3)),
    "adaptive_avg": lambda: nn.AdaptiveAvgPool2d(1),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    assert_parity_of_module(MODULES[name](), IMAGE, [2], mesh_of(3))


@pytest.mark.spmd(3)
def test_averages_first_used_in_inference_mode():
    x = torch.randn(2, 3, 31, 9, dtype=torch.float64)
    with torch.inference_mode():
        F.adaptive_avg_pool2d(lightning_shard.shard(x, mesh_of(3), 2), 4)
    function = functools.partial(F.adaptive_avg_pool2d, output_size=4)
    assert_parity(function, [(2, 3, 31, 9)], {0: [2]}, mesh_of(3))  # compares the gradient


@pytest.mark.spmd(3)
def test_refusals():
    x = lightning_shard.shard(torch.randn(IMAGE), mesh_of(3), 2)
    with pytest.raises(RuntimeError, match="at most half"):
        F.avg_pool2d(x, 2, padding=2)
    with pytest.raises(UnsupportedOperationError, match=r"average of torch\.int64"):
        F.avg_pool2d(x.long(), 3)
    with pytest.raises(RuntimeError, match="too small"):
        F.max_pool2d(x, 10)
    with pytest.raises(UnsupportedOperationError, match="fractional_max_pool2d"):
        F.fractional_max_pool2d(x, 2, 4)
    with pytest.raises(UnsupportedOperationError, match="outside of the windows"):
        F.max_unpool2d(x, torch.zeros(IMAGE, dtype=torch.long), 2)


@pytest.mark.spmd(3)
@pytest.mark.parametrize(
    ("output", "value"), choose([1, 2, 4, 5, 7, 13], [float("nan"), float("inf")])
)
def test_averages_of_other_windows_are_finite(output, value):
    """As of fields whose land is NaN."""
    x = torch.randn(2, 3, 13)
    x[0, 0, 6], x[0, 1, 0], x[1, 2, 12] = value, value, value
    found = F.adaptive_avg_pool1d(lightning_shard.shard(x, mesh_of(3), 2), output)
    expected = F.adaptive_avg_pool1d(x, output)
    torch.testing.assert_close(lightning_shard.gather(found), expected, equal_nan=True)


@pytest.mark.spmd(3)
def test_a_mean_of_many_halves_does_not_overflow():
    x = torch.full((1, 1, 300, 300), 3.0, dtype=torch.float16)
    found = F.adaptive_avg_pool2d(lightning_shard.shard(x, mesh_of(3), 2), 1)
    torch.testing.assert_close(lightning_shard.gather(found), F.adaptive_avg_pool2d(x, 1))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dim", [2, 3])
def test_of_nan_the_last_is_the_largest(dim):
    """As in torch, whose gradient goes to that one."""
    x = torch.randn(2, 3, 13, 9)
    x[0, 0, 2, 1] = x[0, 0, 2, 8] = x[0, 0, 12, 4] = x[1, 1] = torch.nan
    for size in (1, 2, 5):
        split = lightning_shard.shard(x, mesh_of(3), dim)
        found = F.adaptive_max_pool2d(split, size, return_indices=True)
        for mine, wanted in zip(
            found, F.adaptive_max_pool2d(x, size, return_indices=True), strict=True
        ):
            torch.testing.assert_close(lightning_shard.gather(mine), wanted, equal_nan=True)
