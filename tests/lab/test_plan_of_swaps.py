"""`plan` rehearses losses that write rows into a plain tensor, as the one_hot of MONAI does."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_shard


class OneHot(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(1, 3, 3, padding=1)

    def training_step(self, batch, index):
        classes = batch.gt(0).long()
        wanted = torch.zeros(size=(len(batch), 3, *batch.shape[2:]), device=classes.device)
        wanted = wanted.scatter_(dim=1, index=classes, value=1)
        return (self.net(batch).softmax(1) * wanted).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("how", [{"mesh": 2}, {"tiles": 2}], ids=["ranks", "tiles"])
def test_a_loss_that_scatters_into_zeros(how):
    data = DataLoader(list(torch.randn(4, 1, 12, 10)), 2)
    assert lightning_shard.plan(OneHot(), data, **how).memory > 0
