"""What a block's own hooks, and FSDP2, see of the block's split inputs and outputs."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import lightning_shard
from lightning_shard import DomainTensor, ShardingOptions, parallelize
from tests.parity import mesh_of


@dataclass
class State:
    """A record that only its own code can make."""

    x: Tensor
    rows: int = field(init=False)

    def __post_init__(self):
        assert self.x.ndim == 4
        self.rows = self.x.shape[2]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, state, *, scale):
        made = copy.copy(state)
        made.x = self.convolution(state.x) * scale
        return made


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Block() for _ in range(2)).double()

    def forward(self, x):
        state = State(x)
        for block in self.blocks:
            state = block(state, scale=0.5)
        assert state.rows == x.shape[2]
        return state.x


def gradients_alone(network, x):
    network(x).square().mean().backward()
    return {name: p.grad for name, p in network.named_parameters()}


def assert_same_gradients(network, expected):
    for name, p in network.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), expected[name], rtol=1e-9, atol=1e-12)


def image():
    return torch.randn(2, 2, 9, 6, dtype=torch.float64)


@pytest.mark.spmd(2)
def test_records_are_not_made_anew():
    network, x, mesh = Network(), image(), mesh_of(2)
    expected = gradients_alone(copy.deepcopy(network), x)
    parallelize(network, mesh, options=ShardingOptions("full", wrap=["Block"]))
    network(lightning_shard.shard(x, mesh, dims=2)).square().mean().backward()
    assert_same_gradients(network, expected)


@pytest.mark.spmd(2)
def test_records_in_half_precision_are_not_made_anew():
    network, x, mesh = Network().float(), image().float(), mesh_of(2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    parallelize(network, mesh, options=ShardingOptions("full", wrap=["Block"], mp_policy=policy))
    found = network(lightning_shard.shard(x, mesh, dims=2))
    assert found.dtype == torch.bfloat16


def less_its_mean(x):
    return x - x.mean()


class Hooked(nn.Module):
    """A block whose hooks look at all rows of what it is given and of what it gives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.block = nn.Conv2d(2, 2, 3, padding=1).double()
        self.seen = []
        self.block.register_forward_pre_hook(self.before)
        self.block.register_forward_hook(self.after)

    def before(self, _, args):
        self.seen.append(type(args[0]))
        return less_its_mean(*args)

    def after(self, _, args, output):
        self.seen += [type(args[0]), type(output)]
        return less_its_mean(output)

    def forward(self, x):
        return self.block(x)


@pytest.mark.spmd(2)
def test_hooks_that_were_there_see_split_tensors():
    network, x, mesh = Hooked(), image(), mesh_of(2)
    alone = copy.deepcopy(network)
    alone.block._forward_hooks.clear()
    alone.block._forward_pre_hooks.clear()
    output = less_its_mean(alone.block(less_its_mean(x)))
    output.square().mean().backward()
    parallelize(network, mesh, options=ShardingOptions("full", wrap=["Conv2d"]))
    found = network(lightning_shard.shard(x, mesh, dims=2))
    assert network.seen == [DomainTensor] * 3
    torch.testing.assert_close(lightning_shard.gather(found), output)
    found.square().mean().backward()
    assert_same_gradients(network, {n: p.grad for n, p in alone.named_parameters()})
