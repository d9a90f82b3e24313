"""`check` runs what trains in one process; its copies and its records are not in the way."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard.lab.record import Inspection, record
from lightning_shard.lab.run import Task

FIELD = torch.randn(2, 1, 12, 10, generator=torch.Generator().manual_seed(0))


class Adversaries(LightningModule):
    """The second update goes back through what was computed before the first one."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.makes = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 3))
        self.judges = nn.Conv2d(1, 1, 3)

    def training_step(self, batch):
        first, second = self.optimizers()
        made = self.makes(batch)
        losses = self.judges(made.detach()).square().mean(), lambda: self.judges(made).mean()
        first.zero_grad()
        self.manual_backward(losses[0])
        first.step()
        second.zero_grad()
        self.manual_backward(losses[1]())
        second.step()

    def configure_optimizers(self):
        sgd = torch.optim.SGD
        return sgd(self.judges.parameters(), 0.1), sgd(self.makes.parameters(), 0.1)


def test_a_graph_outlives_the_update_of_another_network():
    found = lightning_shard.check(Adversaries(), DataLoader([FIELD], None), simulated=True)
    assert found.is_supported


class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(1, 1, 3, padding=1)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.slow
def test_shards_are_looked_into_alike():
    alone = record(Task(Plain(), None, [FIELD], (1, 1)), Inspection())
    shards = Task(Plain(), None, [FIELD], (1, 2), strategy={"sharding": "full"})
    found = record(shards, Inspection())
    assert alone.gradients.keys() == found.gradients.keys()
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient)


class Normed(Plain):
    """Has a weight that is computed of two parameters before each call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            self.layer = nn.utils.weight_norm(nn.Conv2d(1, 1, 3, padding=1))


def test_weights_that_are_computed_are_copied():
    found = lightning_shard.check(Normed(), DataLoader([FIELD], None), simulated=True)
    assert found.is_supported
