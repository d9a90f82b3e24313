"""Modes of a program around a step, as those that count FLOPs, see operators and pass them on."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_shard
from tests.parity import mesh_of, ranks_of, tiles_of
from tests.tensor.test_autograd_function import Exp


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3)
        self.double()

    def forward(self, x):
        """Give autograd sums of gradients of split tensors, and a Function of the user."""
        y = self.conv(x)
        z = Exp.apply(self.norm(y) + x).sin() * y + x[:, :, :1]
        return (z.square().mean() + y.amax()) * 2


def gradients(net, x):
    return torch.autograd.grad(net(x), [x, *net.parameters()])


def check(mode, where):
    net, x = Net(), torch.randn(2, 3, 7, 5, dtype=torch.float64)
    expected = gradients(net, x.clone().requires_grad_())
    split = lightning_shard.shard(x, where, 2).requires_grad_()
    with mode():
        found = gradients(net, split)
    ranks = ranks_of(where)
    close = {"rtol": 1e-10, "atol": 1e-14}
    torch.testing.assert_close(lightning_shard.gather(found[0]), expected[0], **close)
    for own, value in zip(found[1:], expected[1:], strict=True):
        if ranks > 1:  # each rank starts the backward pass of its replica
            torch.distributed.all_reduce(own)
        torch.testing.assert_close(own / ranks, value, **close)


MODES = pytest.mark.parametrize("mode", [Functions, Operators])


@pytest.mark.spmd(3)
@MODES
def test_on_ranks(mode):
    check(mode, mesh_of(3))


@MODES
def test_in_tiles(mode):
    check(mode, tiles_of(3))
