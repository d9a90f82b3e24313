"""torch.compile around split tensors: what holds them runs as it is, with the same results."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_shard
from tests.pairs import choose
from tests.parity import mesh_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh())

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(x.mean((2, 3))).sin() * x.shape[2]


def compiled_head(module):
    module.head = torch.compile(module.head, backend="aot_eager", fullgraph=True)
    return module


WAYS = {
    "whole": lambda module: torch.compile(module, backend="aot_eager"),
    "dynamic": lambda module: torch.compile(module, backend="aot_eager", dynamic=True),
    "plain part": compiled_head,
}


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("way", choose(WAYS, fast=["plain part"]))
def test_equals_one_process(way):
    torch._dynamo.reset()
    alone = Net().double()
    module = copy.deepcopy(alone)
    run = WAYS[way](module)
    for rows in (7, 9, 7):
        x = torch.randn(2, 3, rows, 5, dtype=torch.float64)
        found, wanted = run(lightning_shard.shard(x, mesh_of(2), 2)), alone(x)
        torch.testing.assert_close(found, wanted)
        found.square().sum().backward()
        wanted.square().sum().backward()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        total = p.grad / 2
        dist.all_reduce(total)
        torch.testing.assert_close(total, q.grad)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_a_whole_graph_is_refused():
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: x.sin() * 2, backend="eager", fullgraph=True)(
            lightning_shard.shard(torch.randn(4, 3), mesh_of(2), 0)
        )
