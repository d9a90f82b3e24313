"""What a callback had thawed before a checkpoint trains after it, too."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader

from lightning_shard.checkpoint.state import full_module_state
from tests.checkpoint.tiny import SaveAfterBatch
from tests.training import Fields, generator, shared_path, trainer


def sample(index):
    return torch.randn(1, 7, 5, generator=generator(index), dtype=torch.float64)


class Tuned(LightningModule):
    def __init__(self, *, by_hand=False):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Conv2d(4, 1, 1)
        self.by_hand = by_hand
        self.backbone.requires_grad_(not by_hand)
        self.double()

    def on_train_epoch_start(self):
        if self.by_hand and self.current_epoch == 1:
            self.backbone.requires_grad_(True)

    def training_step(self, x, batch_idx):
        return (self.head(self.backbone(x)) - 1).square().mean()

    def configure_optimizers(self):
        parameters = self.parameters()
        if not self.by_hand:
            parameters = [p for p in parameters if p.requires_grad]
        return torch.optim.Adam(parameters, lr=0.02)


class SaveAfter(Callback):
    def __init__(self, epoch, path):
        self.epoch, self.path = epoch, path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def fit(module, *callbacks, path=None, **options):
    if not module.by_hand:
        tunes = BackboneFinetuning(1, lambda _: 1.5, backbone_initial_lr=0.005)
        callbacks = (*callbacks, tunes)
    runner = trainer((2,), callbacks=[*callbacks], max_epochs=4, **options)
    runner.fit(module, DataLoader(Fields(sample, 4), 2), ckpt_path=path)
    return full_module_state(module)


@pytest.mark.quick_rows("0-full")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_backbone_trains_again(mode, epoch):
    path = shared_path("epoch.ckpt")
    expected = fit(Tuned(), SaveAfter(epoch, path), strategy={"sharding": mode})
    state = fit(Tuned(), path=path, strategy={"sharding": mode})
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=1e-8, atol=1e-10, msg=key)


class Advised(Tuned):
    """Thaws as the warning advises."""

    def __init__(self):
        super().__init__(by_hand=True)

    def on_train_epoch_start(self):
        """Nothing."""

    def on_train_batch_start(self, batch, batch_idx):
        self.backbone.requires_grad_(self.current_epoch >= 1)


@pytest.mark.quick_rows("full")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_advice_holds_inside_an_epoch(mode):
    path = shared_path("batch.ckpt")
    expected = fit(Advised(), SaveAfterBatch(path, 2, 0), strategy={"sharding": mode})
    state = fit(Advised(), path=path, strategy={"sharding": mode})
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


@pytest.mark.spmd(2)
def test_what_the_module_itself_freezes_again_is_named():
    path = shared_path("epoch.ckpt")
    fit(Tuned(by_hand=True), SaveAfter(2, path))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(Tuned(by_hand=True), path=path)
    words = "backbone.0.weight, backbone.0.bias, backbone.1.weight and 1 more did train when the"
    heard = [str(each.message) for each in told if words in str(each.message)]
    assert len(heard) == (torch.distributed.get_rank() == 0)
