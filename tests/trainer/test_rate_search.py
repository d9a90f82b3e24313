"""lr_find finds on data replicas what one process finds."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from tests import training
from tests.trainer.featured import BATCH, QUIET, SAMPLES, Featured, loader, sample
from tests.training import Fields


class Searched(Featured):
    lr = 0.05

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def found(runner, size, module, **options):
    search = {"num_training": 16, "min_lr": 1e-4, "max_lr": 0.1, **options}
    search = Tuner(runner).lr_find(module, loader(size), **search)
    return search.results["lr"], search.results["loss"], module.lr


@pytest.mark.quick_rows("diverges")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("options", [{}, {"max_lr": 100.0}], ids=["to the end", "diverges"])
def test_replicas_decide_by_the_mean_of_their_losses(options):
    kept = {"max_epochs": 3, "default_root_dir": training.shared_path("found")}
    alone = Trainer(devices=1, plugins=LightningEnvironment(), **(QUIET | kept))
    expected = found(alone, BATCH, Searched(), **options)
    assert (len(expected[1]) < 16) == bool(options)
    for domain, size in (((1,), BATCH // 2), ((2,), BATCH)):
        runner = training.trainer(domain, **kept)
        for mine, theirs in zip(found(runner, size, Searched(), **options), expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)


class Order(LearningRateFinder):
    """Notes which samples are read once the search is over."""

    def __init__(self):
        super().__init__(num_training_steps=4, update_attr=False)
        self.read = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.read.append(batch["x"].sum().item())


class Shuffled(LightningDataModule):
    """Makes a loader each time that it is asked for one."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def train_dataloader(self):
        return DataLoader(Fields(sample, SAMPLES), self.size, shuffle=True)


@pytest.mark.quick_rows("replicas-a data module")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("makes_loaders", [False, True], ids=["a loader", "a data module"])
@pytest.mark.parametrize("domain", [(1,), (2,)], ids=["replicas", "domain"])
def test_training_reads_after_a_search_what_one_process_reads(domain, makes_loaders):
    kept = {"default_root_dir": training.shared_path("searched")}
    found = []
    for alone in (True, False):
        seed_everything(1)
        size = BATCH // 2 if not alone and domain == (1,) else BATCH
        own = {"devices": 1, "plugins": LightningEnvironment(), **(QUIET | kept)}
        order = Order()
        options = {"callbacks": [order]}
        runner = Trainer(**own, **options) if alone else training.trainer(domain, **kept, **options)
        data = Shuffled(size)
        runner.fit(Searched(), data if makes_loaders else data.train_dataloader())
        read = torch.tensor(order.read, dtype=torch.float64)
        if not alone and domain == (1,):
            dist.all_reduce(read)
        found.append(read)
    torch.testing.assert_close(*found)
