"""What Ray's workers run; beside the test, since they import it by name."""

import os
import signal
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard import HybridShardStrategy
from lightning_shard.checkpoint.state import full_module_state
from tests.trainer.featured import QUIET, Featured, loader


class DieOnce(Callback):
    """The last rank is killed at a step of the first attempt."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_train_batch_end(self, trainer, *_):
        last = trainer.global_rank == trainer.world_size - 1
        if trainer.global_step == 4 and last and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(config: dict[str, str]) -> None:
    """Train two epochs from the last checkpoint on, and keep the weights."""
    torch.set_num_threads(1)
    folder = Path(config["folder"])
    callbacks = [ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)]
    if config.get("dies"):
        callbacks.append(DieOnce(folder / "died"))
    settings = {**QUIET, "enable_checkpointing": True, "max_epochs": 2, "default_root_dir": folder}
    trainer = Trainer(
        devices=2,
        strategy=HybridShardStrategy(domain_parallel_size=2, timeout_s=60),
        callbacks=callbacks,
        **settings,
    )
    last = folder / "last.ckpt"
    module = Featured()
    trainer.fit(module, loader(4), ckpt_path=last if last.exists() else None)
    state = full_module_state(module)
    if trainer.is_global_zero:
        torch.save(state, folder / "weights.pt")
