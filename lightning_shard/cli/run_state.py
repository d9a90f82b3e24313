"""How far a run of the command line is, and so what an error of it means to the user."""

import signal
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_shard.cli.sources import Sources


class RunState(Callback):
    """How far the run is, and the last error while building, which the parser would hide.

    Attributes:
        stepped: Whether a batch is done. Before, one sentence says enough of any error; later,
            every error keeps its traceback.
        given: What the user gave.
    """

    has_last_words = True  # which EpochReport leaves to the command line

    def __init__(self) -> None:
        self.stepped = False
        self.given = Sources()
        self.error: Exception | None = None
        self.trainer: Trainer | None = None
        self.started = time.monotonic()
        self.first_step: int | None = None  # of this training, which may not begin

    def stop_children(self) -> None:
        """Stop the ranks launched from here, which would report the same refusal once more."""
        launcher = self.trainer.strategy.launcher if self.trainer else None
        if launcher:
            launcher.kill(signal.SIGKILL)

    def build(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        """Build for the parser, and keep the error that it would replace by its own."""
        try:
            return class_type(*args, **kwargs)
        except Exception as err:
            self.error = err
            raise

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Steps count from here on."""
        self.first_step = trainer.global_step

    def _step(self, *args: Any, **kwargs: Any) -> None:
        self.stepped = True

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _step
