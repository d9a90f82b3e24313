"""What asks a training for its shapes shares datasets, which may hold open files."""

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lightning_shard
from lightning_shard.lab.predict import predict


class OpenFile(Dataset):
    """Opened when it is first read, as h5py files are; it can be neither copied nor pickled."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.reads += 1
        return torch.randn(1, 9, 6)

    def __reduce_ex__(self, protocol):
        raise TypeError("h5py objects cannot be pickled")


class Data(LightningDataModule):
    def setup(self, stage):
        self.fields = OpenFile()
        self.by_name = {"validation": OpenFile()}

    def train_dataloader(self):
        return DataLoader(self.fields, 2)

    def val_dataloader(self):
        return DataLoader(self.by_name["validation"], 2)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(1, 1, 3, padding=1)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def validation_step(self, batch, index):
        self.log("loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    "given", [Data, lambda: DataLoader(OpenFile(), 2)], ids=["module", "loader"]
)
def test_open_files_are_shared(given):
    assert lightning_shard.check(Net(), given(), (1, 2), simulated=True)
    assert lightning_shard.plan(Net(), given(), 2).memory > 0
    assert predict(Net(), given(), tiles=2).memory > 0


def test_certify_reads_an_open_file():
    assert lightning_shard.certify(Net(), Data(), ["1x2"], steps=2, simulated=True)
