"""The first comparison that everyone makes: a script with this strategy, and without.

The order of the samples is that of plain Lightning, bit for bit, and so are random numbers that are
drawn for whole tensors.
"""

import itertools
import os
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    random_split,
)

from lightning_shard.checkpoint.state import full_module_state
from tests import training
from tests.checkpoint import tiny
from tests.checkpoint.tiny import quiet
from tests.trainer.featured import QUIET

SAMPLES, TRAINED, BATCH, EPOCHS = 26, 22, 4, 3


class Noisy(Dataset):
    """Numbered samples, which may be changed at random each time that they are read."""

    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.randn(1, 9, 7, generator=training.generator(index), dtype=torch.float64)
        return torch.tensor(index), x + torch.rand((), dtype=torch.float64) if self.noise else x


class OwnOrder(Sampler):
    """Draws from a generator of NumPy of its own, which goes on from pass to pass."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __len__(self):
        return TRAINED

    def __iter__(self):
        return iter(self.rng.permutation(TRAINED).tolist())


class Net(LightningModule):
    """Draws for whole tensors and for split ones; notes which samples it reads."""

    def __init__(self, dropout):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, dtype=torch.float64)
        self.drop, self.drop_channels = nn.Dropout(dropout), nn.Dropout2d(dropout)
        self.second = nn.Conv2d(4, 1, 3, padding=1, dtype=torch.float64)
        self.noisy, self.read, self.losses = dropout > 0, [], []

    def forward(self, x):
        x = self.drop_channels(self.drop(self.first(x).relu()))
        return self.second(x + 0.1 * torch.randn_like(x) if self.noisy else x)

    def training_step(self, batch, batch_idx):
        numbers, x = batch
        scale = 1 + 0.1 * torch.rand(()) if self.noisy else 1
        loss = (self(x) - x).square().mean() * scale
        self.read.append(numbers.tolist())
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", (self(batch[1]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def plain():
    return Trainer(devices=1, plugins=LightningEnvironment(), **(QUIET | {"max_epochs": EPOCHS}))


def strategy(domain):
    return training.trainer(domain, strategy={"exact_random": True}, max_epochs=EPOCHS)


def loaders(trained, kind, batch_size, workers):
    options = {
        "shuffled": {"shuffle": True},
        "in order": {"shuffle": False},
        "own generator": {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        "weighted": {"sampler": WeightedRandomSampler(range(1, TRAINED + 1), 14)},
        "some": {"sampler": RandomSampler(trained, num_samples=10)},
        "own order": {"sampler": OwnOrder()},
    }[kind]
    return DataLoader(trained, batch_size, num_workers=workers, **options)


def script(trainer, kind="shuffled", *, dropout=0.3, batch_size=BATCH, workers=0):
    """What a user writes; samples read, losses, weights and the next random number."""
    with mock.patch.dict(os.environ), quiet():
        seed_everything(7, verbose=False)
        module = Net(dropout)
        trained, validated = random_split(Noisy(dropout > 0), [TRAINED, SAMPLES - TRAINED])
        trainer.fit(
            module,
            loaders(trained, kind, batch_size, workers),
            DataLoader(validated, batch_size),
        )
        trainer.validate(module, DataLoader(validated, batch_size), verbose=False)
    return module.read, module.losses, full_module_state(module), torch.rand(3)


def assert_equal(found, expected):
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1:3], expected[1:3], rtol=1e-10, atol=1e-12)
    assert torch.equal(found[3], expected[3])


@pytest.mark.spmd(1)
def test_one_process():
    found, expected = script(strategy((1,))), script(plain())
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert_equal(found, expected)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", ["shuffled", "in order", "own generator", "weighted", "some"])
def test_one_replica(kind):
    assert_equal(script(strategy((2,)), kind), script(plain(), kind))


@pytest.mark.slow
def test_workers_draw_alike():
    """In this process: ranks of the pool may start none."""
    ours = tiny.trainer((1,), max_epochs=EPOCHS)
    found = script(ours, workers=1)
    tiny.leave_group()
    assert_equal(found, script(plain(), workers=1))


@pytest.mark.spmd(2)
def test_a_sampler_of_ones_own_is_asked_once_an_epoch():
    assert_equal(script(strategy((2,)), "own order"), script(plain(), "own order"))


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", ["shuffled", "in order", "own order"])
def test_replicas_share_the_samples_of_each_step(kind):
    """Twice the replicas, half the batch: each step reads what plain Lightning's reads."""
    read = script(strategy((1,)), kind, dropout=0.0, batch_size=BATCH // 2)[0]
    expected = script(plain(), kind, dropout=0.0)
    everywhere = [read, read]
    dist.all_gather_object(everywhere, read)
    together = [sorted(a + b) for a, b in zip(*everywhere, strict=True)]
    assert together == [sorted(numbers) for numbers in expected[0]]


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_replicas_that_drew_other_numbers_read_each_sample_once():
    """Numbers that one rank alone drew may not decide what it reads."""

    class Draws(Net):
        def on_train_epoch_start(self):
            torch.rand(3 * dist.get_rank())

    with mock.patch(f"{__name__}.Net", Draws):
        read = script(strategy((1,)), dropout=0.0, batch_size=1)[0]
    everywhere = [read, read]
    dist.all_gather_object(everywhere, read)
    steps = [first + second for first, second in zip(*everywhere, strict=True)]
    epochs = [sorted(itertools.chain(*steps[e * 11 : e * 11 + 11])) for e in range(EPOCHS)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(set(epochs[0])) == TRAINED
    assert steps[:11] != steps[11:22]
