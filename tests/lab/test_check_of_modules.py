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


class ByHand(Plain):
    """In its step a parameter is whole, while its gradient is a shard."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.phase = nn.Parameter(torch.ones(1, 1, 1, 10, dtype=torch.complex64))

    def training_step(self, batch):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = (self.layer(batch) * self.phase).abs().square().mean()
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Plain, ByHand])
def test_shards_are_looked_into_alike(kind):
    alone = record(Task(kind(), None, [FIELD]), Inspection())
    shards = Task(kind(), None, [FIELD], (1, 2), strategy={"sharding": "full"})
    found = record(shards, Inspection())
    assert not found.refused
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


class Predicts(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 3, padding=1)

    def predict_step(self, batch):
        return self.layer(batch)


def test_a_module_that_only_predicts():
    found = lightning_shard.check(Predicts(), DataLoader([FIELD], None), simulated=True)
    assert found.training is None
    assert found.is_supported
    assert "split over the domain: batch (dim 2)" in str(found)
    assert "One predict_step on 2 ranks equals that of one process" in str(found)


class Accumulates(Plain):
    """Its first batch updates nothing."""

    def __init__(self, wrong=0):
        super().__init__()
        self.wrong, self.automatic_optimization = wrong, False

    def training_step(self, batch):
        self.manual_backward(
            self.layer(batch).square().mean() * (1 + self.wrong * self.global_rank)
        )


def test_gradients_of_a_manual_step_that_updates_nothing():
    found = lightning_shard.check(Accumulates(), DataLoader([FIELD], None), simulated=True)
    assert found.is_supported
    assert "gradients  of 2 parameters and buffers" in str(found)
    assert not lightning_shard.check(
        Accumulates(1), DataLoader([FIELD], None), simulated=True
    ).is_exact


class NoNumbers(Plain):
    def __init__(self, of):
        super().__init__()
        self.of = of

    def training_step(self, batch):
        return self.of(self.layer(batch))


@pytest.mark.parametrize(
    ("of", "named"),
    [
        (lambda x: (x * 0 / 0).mean(), "the loss and 2 more"),
        (lambda x: (x - 9).log().mean(), "the loss"),
    ],
)
def test_numbers_that_are_none_in_one_process_either(of, named):
    """Ranks do not differ where both have NaN, and it is said."""
    found = lightning_shard.check(NoNumbers(of), DataLoader([FIELD], None), simulated=True)
    assert found.is_supported, str(found)
    assert f"NaN in one process, too: {named}." in str(found)


def test_a_loader_without_a_batch():
    with pytest.raises(ValueError, match="the DataLoader of training batches has no batch"):
        lightning_shard.check(Plain(), DataLoader([], None), simulated=True)
