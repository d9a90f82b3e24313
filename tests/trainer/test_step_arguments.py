"""Steps take the arguments that the user gave them: Lightning reads their signatures."""

import inspect

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader

from lightning_shard import gather
from tests import training
from tests.trainer.featured import QUIET, assert_same_state
from tests.training import Fields, generator


class OnlyBatches(LightningModule):
    """Its steps take no number of the batch, which Lightning allows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.network = nn.Conv2d(2, 1, 3, padding=1).double()

    def training_step(self, batch):
        loss = self.network(batch).square().mean()
        self.log("loss", loss)
        return loss

    validation_step = test_step = training_step

    def predict_step(self, batch):
        return self.network(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfLoaders(OnlyBatches):
    """Its steps take all that Lightning gives."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", self.network(batch).mean())
        assert batch_idx in (0, 1)
        assert dataloader_idx == 0

    def training_step(self, batch, *others):
        assert others in ((0,), (1,))
        return super().training_step(batch)


class OfTheInstance(OnlyBatches):
    """Its step is a function that was put there."""

    def __init__(self):
        super().__init__()
        self.training_step = lambda batch: self.network(batch).square().mean()


def fields(index):
    return torch.randn(2, 9, 7, generator=generator(index), dtype=torch.float64)


@pytest.mark.quick_rows("OnlyBatches", "OfTheInstance")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", [OnlyBatches, OfLoaders, OfTheInstance])
def test_steps_without_the_number_of_the_batch(kind):
    data = DataLoader(Fields(fields, 4), 2)
    alone, module = kind(), kind()
    signature = inspect.signature(module.training_step)
    plain = Trainer(devices=1, plugins=LightningEnvironment(), **QUIET)
    plain.fit(alone, data, data)
    sharded = {"sharding": "full"} if kind is OfTheInstance else None
    trainer = training.trainer((2,), strategy=sharded, use_distributed_sampler=False)
    trainer.fit(module, data, data)
    assert_same_state(module, alone)
    assert inspect.signature(module.training_step) == signature
    trainer.test(module, data)
    whole = torch.cat(plain.predict(alone, data))
    torch.testing.assert_close(gather(torch.cat(trainer.predict(module, data))), whole)
