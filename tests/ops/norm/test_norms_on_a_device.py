"""Norms of tiles on a device take moments by a kernel of their own there."""

import copy

import pytest
import torch
from torch import nn

from lightning_shard import Tiles, gather, shard
from tests.parity import assert_same

NORMS = {
    "batch": lambda: nn.BatchNorm2d(6),
    "instance": lambda: nn.InstanceNorm2d(6, affine=True),
    "group": lambda: nn.GroupNorm(2, 6),
    "layer": lambda: nn.LayerNorm([6, 9, 5]),
}


@pytest.mark.spmd(1, "xpu")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("stored", [torch.contiguous_format, torch.channels_last])
def test_a_small_variance_around_a_large_mean(norm: str, stored: torch.memory_format) -> None:
    torch.manual_seed(0)
    net = NORMS[norm]()
    x = (100 + torch.randn(2, 6, 9, 5)).contiguous(memory_format=stored)
    weights = torch.randn(2, 6, 9, 5)
    exact, ours = copy.deepcopy(net).double(), net.to("xpu")
    given, field = x.double().requires_grad_(), x.to("xpu").requires_grad_()
    expected = exact(given)
    (expected * weights).sum().backward()
    tiles = Tiles((3,))
    made = ours(shard(field, tiles, 2))
    (made * shard(weights.to("xpu"), tiles, 2)).sum().backward()
    assert field.grad is not None
    assert given.grad is not None
    found = [gather(made), field.grad, *(p.grad for p in ours.parameters())]
    wanted = [expected, given.grad, *(p.grad for p in exact.parameters())]
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert other is not None
        assert_same(one.cpu().double(), other, tolerance=1e-4)
    for one, other in zip(ours.buffers(), exact.buffers(), strict=True):
        assert_same(one.cpu().double(), other.double(), tolerance=1e-5)
