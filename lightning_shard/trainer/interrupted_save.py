"""Reports that an exception left no checkpoint, where `save_on_exception` asked for one.

Ranks can save together only if all of them stop. After Ctrl-C one of them may wait in a collective
for another, so that they are in different steps.
"""

import sys
from pathlib import Path

from typing_extensions import override

from lightning_shard.lightning import Callback, LightningModule, ModelCheckpoint, Trainer
from lightning_shard.trainer.checkpoint_io import is_local, local_path
from lightning_shard.trainer.host import add_once
from lightning_shard.trainer.peers import Peers
from lightning_shard.trainer.saving import Saver


class InterruptedSave(Callback):
    """Runs before all ModelCheckpoints, which would otherwise report that they have saved."""

    def __init__(self, peers: Peers, saver: Saver) -> None:
        """Report of ranks that are `peers` and save by `saver`."""
        self._peers, self._saver = peers, saver
        self._silenced: list[ModelCheckpoint] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let checkpoints be saved again: the Trainer goes on after an exception."""
        for callback in self._silenced:
            callback.save_on_exception = True
        self._silenced = []

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Print it in one line on each rank, and keep ModelCheckpoint from saving."""
        saving = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        saving = [callback for callback in saving if callback.save_on_exception]
        if not saving or not self._peers.is_disconnected():
            return
        self._silenced = saving
        for callback in saving:
            callback.save_on_exception = False
        written = (self._saver.last_written, trainer.ckpt_path)
        last = next((path for path in written if path and not _is_removed(path)), None)
        rest = "there is none from before" if last is None else f"the last whole one is {last}"
        sys.stderr.write(
            f"[rank {trainer.global_rank}] no checkpoint was saved on {type(exception).__name__}, "
            f"since the ranks did not stop in the same step; {rest}\n"
        )


def _is_removed(path: str | Path) -> bool:
    """Return whether a file is no more, as that of a search of the learning rate."""
    return is_local(path) and not local_path(path).exists()


def say_what_was_not_saved(trainer: Trainer, peers: Peers, saver: Saver) -> None:
    """Add the callback to a Trainer, once."""
    add_once(trainer, InterruptedSave(peers, saver), first=True)
