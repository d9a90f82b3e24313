"""What a strategy does around steps and loaders, without a Trainer."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard import ShardingOptions, init_mesh, parallelize
from lightning_shard.trainer.steps import Steps
from tests.parity import mesh_of


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.automatic_optimization = False

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def training_step(self, x, _):
        return self(x).square().mean()


def sharded():
    module = Net()
    mesh = init_mesh({"data": -1, "domain": 1}, "cpu")
    parallelize(module, mesh, methods=["training_step"])
    return module


def are_shards(module):
    return [isinstance(p, DTensor) for p in module.parameters()]


def test_automatic_optimization_starts_from_the_loss_itself():
    steps, loss = Steps(), torch.ones((), requires_grad=True)
    steps.follow(Net(), [])  # it is not sharded
    with steps.backward_of(loss) as start:
        assert start is loss


@pytest.mark.spmd(2)
def test_two_backward_passes_of_one_step():
    module = sharded()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps = Steps()
    steps.follow(module, [optimizer])
    alone = Net()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
    its = torch.optim.SGD(alone.parameters(), lr=0.1)

    def step(module, optimizer, backward):
        for _ in range(2):
            backward(module(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def backward(loss):
        with steps.backward_of(loss) as start:
            start.backward()

    step(module, optimizer, backward)
    step(alone, its, torch.Tensor.backward)
    steps.reshard(module)
    for mine, wanted in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), wanted)


class Assigned(Net):
    """Assigns gradients and steps, whatever is called."""

    def training_step(self, values, optimizer):
        self(torch.zeros(1, 3))
        for p in self.parameters():
            p.grad = values.expand_as(p).clone()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.spmd(2)
def test_assigned_gradients_must_be_equal():
    module = Assigned()
    wanted = [p.detach() - 0.1 for p in Assigned().parameters()]
    parallelize(module, init_mesh({"data": -1, "domain": 1}, "cpu"), methods=["training_step"])
    optimizer, steps = torch.optim.SGD(module.parameters(), lr=0.1), Steps()
    steps.follow(module, [optimizer])
    module.training_step(torch.ones(()), optimizer)
    steps.reshard(module)
    for mine, value in zip(module.parameters(), wanted, strict=True):
        torch.testing.assert_close(mine.full_tensor(), value)
    with pytest.raises(RuntimeError, match="must be equal on all ranks; sharding='none' averages"):
        module.training_step(torch.tensor(float(dist.get_rank())), optimizer)


@pytest.mark.spmd(2)
def test_parameters_are_whole_while_a_stage_predicts():
    module, steps = sharded(), Steps()
    assert all(are_shards(module))
    steps.keep_parameters_whole(module, True)
    assert not any(are_shards(module))
    if dist.get_rank() == 0:  # with no collective, so that ranks may have different batches
        with torch.no_grad():
            module(torch.zeros(1, 3))
    steps.keep_parameters_whole(module, False)
    assert all(are_shards(module))


@pytest.mark.spmd(2)
def test_evaluation_leaves_shards():
    module, steps = sharded(), Steps()
    steps.prepare(module, ShardingOptions("gradients"), mesh_of(2))
    with torch.no_grad():
        module.training_step(torch.zeros(1, 3), 0)
    steps.reshard(module)
    assert all(are_shards(module))
