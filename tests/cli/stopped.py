"""A callback for tests/cli/test_resume_line.py: runs wait with it until a signal was sent."""

import os
import signal
import time
from pathlib import Path

from lightning.pytorch import Callback, Trainer

AT_STEP, WAIT_S = 2, 120


class WaitForSignal(Callback):
    """Waits after a step until the test has sent its signal, and notes at which steps runs begin.

    The folder is the one in which the run works.
    """

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        if trainer.is_global_zero:
            with Path("begun").open("a") as file:
                file.write(f"{trainer.global_step}\n")

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step != AT_STEP or Path("sent").exists():
            return
        Path(f"waits_{trainer.global_rank}").write_text(str(os.getpid()))
        deadline = time.monotonic() + WAIT_S
        while not Path("sent").exists() and time.monotonic() < deadline:
            time.sleep(0.02)


class InterruptsItself(WaitForSignal):
    """Sends Ctrl-C to the process of the run, which waits for nobody."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == AT_STEP and not Path("sent").exists():
            Path("sent").touch()
            signal.raise_signal(signal.SIGINT)
