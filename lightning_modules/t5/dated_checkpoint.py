"""Names checkpoints after the date of the run, as PyTorch's tutorial of FSDP on T5 does."""

from datetime import datetime

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override


class DatedCheckpoint(ModelCheckpoint):
    """Keeps checkpoints as Lightning's ModelCheckpoint does, whose arguments it takes.

    In `filename` it puts the date and time at which the run began in place of `{date}`, such as
    2026-11-25-15-26-39, equal on all ranks. Colons are left out, since some file systems and
    programs refuse them.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.filename and "{date}" in self.filename:
            now = datetime.now().astimezone().strftime("%Y-%m-%d-%H-%M-%S")
            self.filename = self.filename.replace("{date}", trainer.strategy.broadcast(now))
