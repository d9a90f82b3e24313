"""What asks a training for its shapes shares datasets, which may hold open files."""

import copy
import pickle

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lightning_shard
from lightning_shard.lab.predict import predict
from lightning_shard.memory import free
from tests.pairs import choose

h5py = pytest.importorskip("h5py")


class Fields(Dataset):
    """Opens its file when it is first read, as users of h5py write it."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.file is None:
            self.file = h5py.File(self.path)
        return torch.from_numpy(self.file["x"][index])


class Data(LightningDataModule):
    def __init__(self, fields):
        super().__init__()
        self.fields, self.by_name = fields, {"validation": fields}

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


class NetWithData(Net):
    """Has the dataset itself, and loaders in a list, as modules of one file do."""

    def __init__(self, fields):
        super().__init__()
        self.fields, self.loaders = fields, [DataLoader(fields, 2)]

    def train_dataloader(self):
        return self.loaders[0]


@pytest.fixture
def fields(tmp_path):
    with h5py.File(tmp_path / "fields.h5", "w") as file:
        file["x"] = np.random.default_rng(0).standard_normal((4, 1, 9, 6)).astype(np.float32)
    dataset = Fields(tmp_path / "fields.h5")
    assert dataset[0].shape == (1, 9, 6)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="h5py objects cannot be pickled"):
            copied(dataset)
    return dataset


GIVEN = {
    "data module": lambda fields: (Net(), Data(fields)),
    "loader": lambda fields: (Net(), DataLoader(fields, 2)),
    "module": lambda fields: (NetWithData(fields), DataLoader(fields, 2)),
}


def _auto(module, data, folder, monkeypatch):
    """Train with the number of tiles that `auto` finds."""
    monkeypatch.setattr(free, "limits", lambda: [("here", 2**30)])
    strategy = lightning_shard.TiledStrategy("auto", tile_memory=folder)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, data)
    return strategy.chosen.tiles == 1 and trainer.global_step == 1


ASKED = {
    "check": lambda module, data, *_: lightning_shard.check(module, data, (1, 2), simulated=True),
    "check on ranks": lambda module, data, *_: lightning_shard.check(module, data, (1, 2)),
    "plan": lambda module, data, *_: lightning_shard.plan(module, data, 2).memory > 0,
    "plan of tiles": lambda module, data, *_: predict(module, data, tiles=2).memory > 0,
    "certify": lambda module, data, *_: lightning_shard.certify(
        module, data, ["1x2"], steps=2, simulated=True
    ),
    "auto": _auto,
}


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize(("asked", "given"), choose(ASKED, GIVEN))
def test_open_files_are_shared(asked, given, fields, tmp_path, monkeypatch):
    module, data = GIVEN[given](fields)
    before = fields.file
    assert ASKED[asked](module, data, tmp_path, monkeypatch)
    assert fields.file is before
