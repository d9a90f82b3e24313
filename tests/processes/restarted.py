"""A training that Ray Train and torchrun start again: it goes on from its last checkpoint."""

import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard import HybridShardStrategy, process_info
from lightning_shard.checkpoint.state import full_module_state
from tests.trainer.featured import QUIET, Featured, loader

AT_STEP = 4


class Once:
    """What happens to one rank in the first attempt only."""

    def __init__(self, what: str, mark: Path) -> None:
        self.what, self.mark = what, mark

    def __call__(self) -> None:
        if self.mark.exists():
            return
        self.mark.touch()
        if self.what == "exception":
            raise ArithmeticError("the fault of the test")
        if self.what == "node":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class AfterStep(Callback):
    def __init__(self, once: Once) -> None:
        self.once = once

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == AT_STEP:
            self.once()


def train(config: dict[str, str]) -> None:
    """Train two epochs from the last checkpoint on, and keep the weights.

    Args:
        config: Of strings. `folder`; `dies`: "kill", "exception" or "node", what happens once to
            `rank`, or to the rank that has the variable DIES; `at`: "step" or "write"; `format` of
            checkpoints; `domain`: "auto", or a number.
    """
    torch.set_num_threads(1)
    folder, info = Path(config["folder"]), process_info()
    callbacks: list[Callback] = [ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)]
    dies = config.get("dies", "")
    dying = dies and (int(config.get("rank", "1")) == info.rank or "DIES" in os.environ)
    once = Once(dies, folder / "died")
    writes = dying and config.get("at") == "write"
    if dying and not writes:
        callbacks.append(AfterStep(once))
    domain = config.get("domain", "2")
    trainer = Trainer(
        devices=info.local_world_size,
        num_nodes=info.world_size // info.local_world_size,
        strategy=HybridShardStrategy(
            domain_parallel_size="auto" if domain == "auto" else int(domain),
            checkpoint_format=config.get("format", "single"),  # pyright: ignore
            timeout_s=60,
        ),
        callbacks=callbacks,
        **{**QUIET, "enable_checkpointing": True, "max_epochs": 2, "default_root_dir": folder},
    )
    module, last, save = Featured(), folder / "last.ckpt", torch.save

    def die_and_save(*args, **kwargs):
        if writes and trainer.global_step == AT_STEP:
            once()
        save(*args, **kwargs)

    with mock.patch("torch.save", die_and_save):
        trainer.fit(module, loader(4), ckpt_path=last if last.exists() else None)
    state = full_module_state(module)
    if trainer.is_global_zero:
        torch.save(state, folder / "weights.pt")
        (folder / "world").write_text(str(info.world_size))


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
