"""What modules log of their training loss is the mean over the epoch and over all ranks."""

import contextlib
import csv
import io
import re

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_modules import MNISTModule
from lightning_shard import EpochReport
from lightning_shard.trainer.callbacks.epoch_report import memory_mib
from tests import training
from tests.training import Losses, shared_path


class Slow(torch.optim.SGD):
    """Leaves the weights as they are, so that the mean is known."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)


@pytest.mark.quick_rows("2x1")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [(1,), (2,)], ids=["2x1", "1x2"])
def test_mean_of_the_epoch_in_line_and_file(domain):
    folder, seen = shared_path("logs"), Losses()
    module = MNISTModule(conv_dropout=0.0, linear_dropout=0.0, optimizer=Slow)
    runner = training.trainer(
        domain, logger=CSVLogger(folder), log_every_n_steps=1, callbacks=[seen, EpochReport()]
    )
    data = training.loader("mnist", torch.float32, 3, 12)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        runner.fit(module, data)
    losses = torch.tensor(seen.values, dtype=torch.float64)
    dist.all_reduce(losses)
    mean = float(losses.mean() / 2)
    assert float(runner.callback_metrics["train/loss"]) == pytest.approx(mean, rel=1e-5)
    if dist.get_rank():
        return
    with next(folder.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    (logged,) = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert logged == pytest.approx(mean, rel=1e-5)
    assert sum(bool(row["train/loss_step"]) for row in rows) == len(seen.values)
    line = shown.getvalue().splitlines()[0]
    assert line.startswith("Epoch 0: ")
    found = re.search(r"train/loss ([0-9.]+), ([0-9.e+]+) samples/s, peak memory \d+ MiB", line)
    assert float(found[1]) == pytest.approx(mean, rel=1e-3)
    assert "loss_step" not in line


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_a_resumed_run_is_silent_on_the_epoch_that_was_over():
    """Saved in validation; Lightning then ends the epoch once more, without a batch."""
    folder = shared_path("checkpoints")
    data = training.loader("mnist", torch.float32, 3, 12)

    def shown_by(epochs, path):
        kept = ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=False)
        runner = training.trainer(
            (2,), callbacks=[kept, EpochReport()], max_epochs=epochs, enable_checkpointing=True
        )
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            runner.fit(MNISTModule(), data, data, ckpt_path=path)
        return [line[:8] for line in shown.getvalue().splitlines() if line.startswith("Epoch")]

    first = shown_by(2, None)
    assert first == ([] if dist.get_rank() else ["Epoch 0:", "Epoch 1:"])
    resumed = shown_by(3, folder / "last.ckpt")
    assert resumed == ([] if dist.get_rank() else ["Epoch 2:"])


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_an_epoch_without_validation_shows_none():
    """Lightning keeps the values of the last one."""
    runner = training.trainer(
        (2,), callbacks=[EpochReport()], max_epochs=4, check_val_every_n_epoch=2
    )
    data = training.loader("mnist", torch.float32, 3, 6)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        runner.fit(MNISTModule(), data, data)
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("Epoch")]
    expected = [] if dist.get_rank() else [False, True, False, True]
    assert ["val/" in line for line in lines] == expected
    assert all("train/loss" in line for line in lines)


# the second run goes on in the folder of the first
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_new_best_is_said_when_it_comes(tmp_path, capsys):
    """A resumed run compares with the best of the run before it."""

    class Given(MNISTModule):
        def on_train_epoch_start(self):
            self.given = [3.0, 2.0, float("nan"), 2.5, 1.0, 1.0, 0.5][self.current_epoch]

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.given, prog_bar=True)

    def lines(epochs, path=None):
        kept = ModelCheckpoint(tmp_path, monitor="val/loss", save_last=True)
        runner = Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, callbacks=[kept, EpochReport()],
            enable_progress_bar=False, enable_model_summary=False, logger=False,
            num_sanity_val_steps=0, limit_train_batches=1, log_every_n_steps=1,
        )  # fmt: skip
        data = training.loader("mnist", torch.float32, 2, 2)
        runner.fit(Given(), data, data, ckpt_path=path)
        shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch")]
        return [line.endswith(", new best val/loss") for line in shown]

    assert lines(5) == [True, True, False, False, True]
    assert lines(7, str(tmp_path / "last.ckpt")) == [False, True]


def test_memory_of_a_device_is_allocated_and_reserved(monkeypatch):
    sizes = {"memory_allocated": 3, "memory_reserved": 4, "max_memory_allocated": 5}
    for name, mib in sizes.items():
        monkeypatch.setattr(torch.accelerator, name, lambda _, mib=mib: mib * 2**20)
    expected = {"peak_memory_mib": 5, "memory_allocated_mib": 3, "memory_reserved_mib": 4}
    assert memory_mib(torch.device("cuda", 0)) == expected
    assert memory_mib(torch.device("cpu")).keys() == {"peak_memory_mib"}
