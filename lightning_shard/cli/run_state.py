"""How far a run of the command line is, and so what an error of it means to the user."""

import signal
import time
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer

REFUSALS = (ValueError, OSError, NotImplementedError, MisconfigurationException)


class RunState(Callback):
    """How far the run is, and the last error while building, which the parser would hide.

    Attributes:
        running: Whether batches flow.
        stepped: Whether a batch is done: then every error keeps its traceback.
    """

    has_last_words = True  # which EpochReport leaves to the command line

    def __init__(self) -> None:
        self.running = self.stepped = False
        self.error: Exception | None = None
        self.trainer: Trainer | None = None
        self.started = time.monotonic()
        self.first_step: int | None = None  # of this training, which may not begin

    def is_refusal(self, err: Exception) -> bool:
        """Whether one sentence says enough: of options that are refused, and of the first batch."""
        return not self.stepped if self.running else isinstance(err, REFUSALS)

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

    def _run(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.running = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Batches flow from here on, and steps count."""
        self.running, self.first_step = True, trainer.global_step

    def _step(self, *args: Any, **kwargs: Any) -> None:
        self.stepped = True

    on_sanity_check_start = on_validation_start = _run
    on_test_start = on_predict_start = _run
    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _step
