"""Replicas whose steps take other branches: right as under DDP, or a sentence on all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard import init_mesh, parallelize
from lightning_shard.fsdp.options import ShardingOptions


class Heads(nn.Module):
    """A head for each kind of sample, in one block, and a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.heads = nn.ModuleList(nn.Linear(3, 5) for _ in range(3))
        self.trunk = nn.Linear(5, 2)
        self.idle = nn.Linear(2, 1)
        self.double()

    def forward(self, x, kind):
        return self.trunk(self.heads[kind](x).tanh())


def samples():
    x = torch.randn(4, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return list(zip(x, (0, 1, 1, 0), strict=True))


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def gradients(module):
    return {
        name: None if p.grad is None else whole(p.grad) for name, p in module.named_parameters()
    }


def alone(steps):
    """The mean gradients of two samples for each step, in one process."""
    module, found = Heads(), []
    for step in range(steps):
        losses = [module(*s).square().mean() for s in samples()[2 * step : 2 * step + 2]]
        module.zero_grad()
        (sum(losses) / 2).backward()
        found.append(gradients(module))
    return found


MODES = pytest.mark.parametrize("mode", ["full", "gradients", "none", "hybrid"])


@pytest.mark.spmd(2)
@MODES
def test_heads_of_one_block(mode):
    """Each replica uses another head, in turns; the third head and a layer are used by none."""
    expected, module = alone(2), Heads()
    sizes = {"replicate": 2, "shard": 1} if mode == "hybrid" else {"data": 2}
    parallelize(module, init_mesh(sizes), options=ShardingOptions(mode))
    for step in range(2):
        module.zero_grad()
        module(*samples()[2 * step + dist.get_rank()]).square().mean().backward()
        found = gradients(module)
        for name, value in expected[step].items():
            if value is None:
                assert found[name] is None, name
            else:
                torch.testing.assert_close(found[name], value)


@pytest.mark.spmd(3)
def test_parameters_smaller_than_the_ranks():
    """Of `trunk.bias` with two numbers one of three ranks has none; no rank forgets alone."""
    module = Heads()
    parallelize(module, init_mesh({"data": 3}))
    module(*samples()[dist.get_rank()]).square().mean().backward()
    without = [name for name, p in module.named_parameters() if p.grad is None]
    assert without == ["heads.2.weight", "heads.2.bias", "idle.weight", "idle.bias"]


@pytest.mark.spmd(2)
def test_nothing_is_sent_where_all_is_used():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    parallelize(module, init_mesh({"data": 2}))
    sent = []
    plain = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *a, **k: (sent.append(a), plain(*a, **k))[1])
        for _ in range(3):
            module(samples()[0][0]).sum().backward()
    assert len(sent) == 1  # after the first backward


@pytest.mark.spmd(2)
def test_accumulated_gradients_stay():
    expected, module = Heads(), Heads()
    parallelize(module, init_mesh({"data": 2}))
    for step in range(2):
        module(*samples()[2 * step + dist.get_rank()]).square().mean().backward()
    for x, kind in samples():
        (expected(x, kind).square().mean() / 2).backward()
    found = gradients(module)
    for name, p in expected.named_parameters():
        assert (p.grad is None) == (found[name] is None)
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad)
