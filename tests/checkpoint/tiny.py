"""A small module with all that a checkpoint must keep, and runs of it that stop and resume."""

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.checkpoint.state import full_module_state
from tests.training import Fields, Losses, accelerator, generator

SAMPLES = 24
BATCH = 4  # samples of one step, over all data replicas


def sample(index: int) -> Tensor:
    return torch.randn(1, 9, generator=generator(index), dtype=torch.float64)


class Tiny(LightningModule):
    """Uneven shards, a complex weight, a scalar, running statistics, dropout."""

    def __init__(
        self, dropout: float = 0.5, optimizers: int = 1, width: int = 5, norm: bool = True
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = optimizers == 1
        self.first = nn.Conv1d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Conv1d(width, 1, 3, padding=1)
        self.spectrum = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.first(x)).relu())
        return (
            self.second(x) * self.scale + x.mean((1, 2), keepdim=True) * self.spectrum.abs().sum()
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self(batch) - 2 * batch).square().mean()
        self.log("loss", loss, batch_size=len(batch))
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch).square().mean(), batch_size=len(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}
        inner = [*self.first.parameters(), self.spectrum]
        outer = [*self.second.parameters(), *self.norm.parameters(), self.scale]
        return torch.optim.Adam(inner, lr=1e-2), torch.optim.SGD(outer, lr=1e-2, momentum=0.9)


def tiny(seed: int = 7, **options: Any) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(**options)


class SaveAt(Callback):
    """Saves after some step, at the end of the batch or of its epoch."""

    def __init__(self, path: Path, step: int, at: str = "batch") -> None:
        self.path, self.step, self.at = path, step, at

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.at == "batch" and trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.at == "epoch" and trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class SaveAfterBatch(Callback):
    """Saves after a batch of an epoch."""

    def __init__(self, path: Path, epoch: int, batch: int) -> None:
        self.path, self.place = path, (epoch, batch)

    def on_train_batch_end(self, trainer: Trainer, *given: Any) -> None:
        if (trainer.current_epoch, given[-1]) == self.place:
            trainer.save_checkpoint(self.path)


def loader(replicas: int = 1, samples: int = SAMPLES) -> DataLoader:
    """Batches for training, shuffled, or a few samples for validation."""
    return DataLoader(Fields(sample, samples), BATCH // replicas, shuffle=samples == SAMPLES)


def trainer(domain: Sequence[int] = (1,), *callbacks: Callback, **options: Any) -> Trainer:
    """Of all ranks of the pool, or of this process alone."""
    settings: dict[str, Any] = {
        "max_epochs": 2, "logger": False, "enable_checkpointing": False, "accelerator": "cpu",
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
        "plugins": LightningEnvironment(), "devices": 1,
    }  # fmt: skip
    if "TORCHELASTIC_RUN_ID" in os.environ:
        settings |= {
            "devices": dist.get_world_size(),
            "plugins": TorchElasticEnvironment(),
            "accelerator": accelerator(),
        }
    names = ("checkpoint_format", "checkpoint_io", "precision_plugin", "sharding")
    own = {name: options.pop(name) for name in names if name in options}
    strategy = HybridShardStrategy(domain_parallel_size=tuple(domain), **own)
    return Trainer(**(settings | {"strategy": strategy, "callbacks": [*callbacks]} | options))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's advice to use more workers, which tests turn into an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        yield


def replicas_of(domain: Sequence[int]) -> int:
    return (dist.get_world_size() if dist.is_initialized() else 1) // math.prod(domain)


def fit(
    domain: Sequence[int] = (1,),
    *callbacks: Callback,
    module: LightningModule | None = None,
    path: Path | None = None,
    weights_only: bool | None = None,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor], LightningModule]:
    """Train two epochs of six steps; losses of this rank, whole weights, the module."""
    module, losses = module or tiny(), Losses()
    runner = trainer(domain, losses, *callbacks, **options)
    replicas = replicas_of(domain)
    with quiet():
        runner.fit(
            module,
            loader(replicas),
            loader(replicas, BATCH),
            ckpt_path=path,
            weights_only=weights_only,
        )
    state = full_module_state(module)
    leave_group()
    return losses.values, state, module


def leave_group() -> None:
    """Outside of the pool a trainer leaves a process group, which forked ranks would inherit."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and dist.is_initialized():
        dist.destroy_process_group()


def mean_over_ranks(values: list[float]) -> Tensor:
    total = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total


def run_with(callback, path=None, **options):
    return fit((2,), callback, path=path, enable_checkpointing=True, **options)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
