"""Callbacks and checkpoints: ModelCheckpoint, averages, states of callbacks, deferred modules."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_shard.checkpoint.state import full
from tests.checkpoint.tiny import SaveAt, fit, names, run_with
from tests.training import shared_path, trainer

SLOW = pytest.mark.slow
DIRECTORY = {"checkpoint_format": "sharded"}
LATER = {"checkpoint_format": "async"}


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "options", [pytest.param(DIRECTORY, marks=SLOW), LATER], ids=["now", "later"]
)
def test_model_checkpoint(options):
    """Top-k, last, versions, removal; `last` and `best` are found."""
    folder = shared_path("here")
    best = ModelCheckpoint(
        folder, monitor="val_loss", mode="max", save_top_k=2, save_last=True, filename="{step}"
    )
    losses, _, _ = run_with(best, max_epochs=4, **options)
    assert len(best.best_k_models) == 2
    assert names(folder) == {Path(p).name for p in best.best_k_models} | {"last.ckpt"}
    assert len(losses) == 24
    dist.barrier()
    # what a run that was killed while saving leaves is not taken for a checkpoint
    if dist.get_rank() == 0:
        shutil.copytree(folder / "last.ckpt", folder / "last.ckpt.partial")
        (folder / "last.ckpt.partial" / "manifest.json").unlink()
    dist.barrier()
    saved_in = json.loads((folder / "last.ckpt" / "manifest.json").read_text())["epoch"]
    resumed, _, _ = run_with(ModelCheckpoint(folder, save_last=True), path="last", max_epochs=5)
    assert len(resumed) == 6 * (4 - saved_in)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_last_as_a_link():
    folder = shared_path("here")
    run_with(ModelCheckpoint(folder, save_last="link", every_n_epochs=1), **DIRECTORY)
    assert (folder / "last.ckpt").is_symlink()
    resumed, _, _ = run_with(ModelCheckpoint(folder), path="last", max_epochs=3)
    assert len(resumed) == 6


class Copy(Callback):
    """Keeps sharded tensors in its state."""

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 3:
            self.kept = [p.detach().clone() for p in module.parameters()]

    def state_dict(self):
        return {"kept": self.kept} if hasattr(self, "kept") else {}

    def load_state_dict(self, state):
        self.loaded = state["kept"]


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=SLOW), DIRECTORY, pytest.param(LATER, marks=SLOW)],
    ids=["file", "now", "later"],
)
def test_sharded_tensors_of_callbacks(options):
    path, saving, loading = shared_path("some.ckpt"), Copy(), Copy()
    fit((2,), saving, SaveAt(path, 4), sharding="full", **options)
    assert any(isinstance(value, DTensor) for value in saving.kept)
    fit((2,), loading, path=path)
    for loaded, kept in zip(loading.loaded, full(saving.kept), strict=True):
        assert torch.equal(loaded, kept)


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("options", [pytest.param({}, marks=SLOW), DIRECTORY], ids=["file", "dir"])
def test_averaged_weights(options):
    path = shared_path("some.ckpt")
    losses, state, _ = fit((2,), WeightAveraging(), SaveAt(path, 4), **options)
    resumed, resumed_state, _ = fit((2,), WeightAveraging(), path=path)
    assert resumed == losses[4:]
    assert not [n for n, value in state.items() if not torch.equal(resumed_state[n], value)]


class Deferred(LightningModule):
    """On the meta device until it is sharded, with a metric that checkpoints keep."""

    def __init__(self):
        super().__init__()
        self.seen = MeanMetric()
        self.seen.persistent(True)

    def configure_model(self):
        if not hasattr(self, "network"):
            with torch.device("meta"):
                self.network = nn.Conv1d(1, 1, 3, padding=1, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        loss = (self.network(batch) - batch).square().mean()
        self.seen.update(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class WithObject(Deferred):
    """Puts into the checkpoint what only weights_only=False reads."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["more"] = Path("a")


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_weights_only_of_a_directory():
    path = shared_path("some.ckpt")
    fit((2,), SaveAt(path, 4), WithPath(), **DIRECTORY)
    with pytest.raises(ValueError, match="besides tensors and plain values"):
        fit((2,), path=path)
    fit((2,), path=path, weights_only=False)


class WithPath(Callback):
    def state_dict(self):
        return {"where": Path("a")}


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "options", [{}, pytest.param(DIRECTORY, marks=SLOW)], ids=["file", "directory"]
)
def test_modules_of_the_meta_device(options):
    """They are loaded when they have memory; Lightning then forgets weights_only=False."""
    path, modules = shared_path("some.ckpt"), [Deferred(), Deferred()]
    losses, state, _ = fit((2,), SaveAt(path, 4), module=modules[0], **options)
    resumed, resumed_state, _ = fit((2,), module=modules[1], path=path)
    assert resumed == losses[4:]
    assert state.keys() > {"network.weight", "seen.mean_value"}
    assert all(torch.equal(resumed_state[name], value) for name, value in state.items())
    odd = SaveAt(path.with_name("odd.ckpt"), 4)
    fit((2,), odd, module=WithObject(), **options)
    with pytest.raises(ValueError, match=r"Lightning 2\.6 forgets weights_only=False"):
        fit((2,), module=Deferred(), path=odd.path, weights_only=False)


class Reporter(nn.Module, Callback):
    """A part of the network and a callback: Lightning gives it `log` of the whole module."""

    def forward(self, x):
        return x


class Reports(LightningModule):
    """Keeps a callback among its hyperparameters, as anomalib's models do."""

    def __init__(self, reporter, path):
        super().__init__()
        self.save_hyperparameters()
        self.reporter = reporter
        self.network = nn.Conv2d(1, 1, 3, padding=1)

    def configure_callbacks(self):
        return [self.reporter]

    def training_step(self, x, batch_idx):
        return self.network(self.reporter(x)).square().mean()

    def on_train_epoch_end(self):
        self.trainer.save_checkpoint(self.hparams.path)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_module_among_the_hyperparameters_that_holds_the_whole(mode):
    path = shared_path("reports.ckpt")
    runner = trainer((2,), strategy={"sharding": mode})
    runner.fit(Reports(Reporter(), path), DataLoader(torch.randn(2, 1, 6, 5), 1))
    loaded = torch.load(path, weights_only=False)
    assert type(loaded["hyper_parameters"]["reporter"]) is Reporter
