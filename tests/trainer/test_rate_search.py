"""lr_find finds on data replicas what one process finds."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.tuner import Tuner

from tests import training
from tests.trainer.featured import BATCH, QUIET, Featured, loader


class Searched(Featured):
    lr = 0.05

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def found(runner, size, module, **options):
    search = {"num_training": 16, "min_lr": 1e-4, "max_lr": 0.1, **options}
    search = Tuner(runner).lr_find(module, loader(size), **search)
    return search.results["lr"], search.results["loss"], module.lr


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
