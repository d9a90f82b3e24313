"""NaN ends training on all ranks before it reaches the weights, and is located."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_shard

ROWS, BAD_BATCH = 10, 3


class Fields(Dataset[dict[str, Tensor]]):
    """Fields of ROWS rows; one value of a late row of one sample may be NaN."""

    def __init__(self, bad: bool) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        torch.manual_seed(index)
        x = torch.randn(1, ROWS, 6)
        if self.bad and index == 2 * BAD_BATCH:
            x[0, ROWS - 1, 2] = float("nan")
        return {"x": x, "y": torch.randn(1, ROWS, 6)}


class Network(LightningModule):
    """Two convolutions; with `pole` the second meets infinity in batch BAD_BATCH."""

    def __init__(self, pole: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.middle = nn.Tanh()
        self.last = nn.Conv2d(4, 1, 3, padding=1)
        self.pole = pole

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.middle(self.first(batch["x"]))
        if self.pole and batch_idx == BAD_BATCH:
            hidden = self.last(hidden * float("inf"))
            return hidden.square().mean()
        loss = (self.last(hidden) - batch["y"]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def message_of(module: LightningModule, bad: bool, folder: Path, **options: Any) -> str:
    """What ends the training; the checkpoint of the step before is there and finite."""
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=0)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[lightning_shard.StopOnNonFinite(), saves],
        default_root_dir=folder, **options,
    )  # fmt: skip
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(module, DataLoader(Fields(bad), batch_size=2))
    last = torch.load(folder / "last.ckpt", weights_only=True)
    assert all(value.isfinite().all() for value in last["state_dict"].values())
    batch = re.search(r"batch (\d+) of epoch 0", str(caught.value))
    assert batch is not None, caught.value
    assert last["global_step"] == int(batch[1]) // options.get("accumulate_grad_batches", 1) > 0
    return str(caught.value)


def on_ranks(domain: int | Sequence[int], folder: str, **options: Any) -> str:
    strategy = lightning_shard.HybridShardStrategy(domain_parallel_size=domain)
    return message_of(Network(**options), not options, Path(folder), strategy=strategy, devices=2)


@pytest.mark.spmd(2)
def test_the_rank_whose_rows_are_bad_is_named(tmp_path):
    message = on_ranks(2, str(tmp_path))
    assert " is not finite: on rank 1 " in message
    assert "the batch itself" in message
    assert "resume from the last checkpoint" in message


@pytest.mark.spmd(2)
def test_the_first_module_is_named(tmp_path):
    message = on_ranks(2, str(tmp_path), pole=True)
    assert "those of the output of last (Conv2d)" in message


def test_one_process_and_an_accumulated_batch(tmp_path):
    message = message_of(Network(), True, tmp_path, accumulate_grad_batches=3, devices=1)
    assert f"batch {BAD_BATCH} of epoch 0" in message


def test_a_finite_run_is_left_alone(tmp_path):
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[lightning_shard.StopOnNonFinite()],
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Network(), DataLoader(Fields(bad=False), batch_size=2))
    assert trainer.global_step == 6
