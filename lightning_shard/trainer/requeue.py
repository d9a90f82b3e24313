"""Saves a SLURM job that is to be queued again between two steps, on all ranks.

Lightning 2.6 saves in the signal's handler, wherever each rank is just then; saving is collective,
so a rank in another collective would wait for ever or mix up what it receives.
"""

import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_shard.lightning import (
    Callback,
    LightningModule,
    SLURMEnvironment,
    Trainer,
    package,
)
from lightning_shard.trainer.host import add_once, callbacks_of


class SaveBeforeRequeue(Callback):
    """Notes the signal, and saves as Lightning does once all ranks have ended the step."""

    def __init__(self, wanted: signal.Signals) -> None:
        """Wait for the signal `wanted`."""
        self._signal, self._asked = wanted, False
        self._saves: Any = None  # Lightning's handler

    def take(self) -> None:
        """Take the signal from Lightning, once it has set its handler; leave those of others."""
        handler = signal.getsignal(self._signal)
        if str(type(handler).__module__).startswith(package()):
            self._saves = handler
            signal.signal(self._signal, self._note)

    def _note(self, *_: Any) -> None:
        self._asked = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Save, and queue the job again, if any rank has heard the signal."""
        asked = torch.tensor(float(self._asked), device=trainer.strategy.root_device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)  # ranks hear of it at different times
        if asked:
            self._asked = False
            self._saves(self._signal, None)


def save_before_requeue(trainer: Trainer, environment: Any) -> Callable[[], None]:
    """Let all ranks save together in a job of SLURM that Lightning may queue again.

    Returns:
        A function that takes the signal, once Lightning has set its own handler.
    """
    received = environment.requeue_signal if isinstance(environment, SLURMEnvironment) else None
    if received is None or not environment.auto_requeue:
        return lambda: None
    add_once(trainer, SaveBeforeRequeue(received))
    (callback,) = (c for c in callbacks_of(trainer) if isinstance(c, SaveBeforeRequeue))
    return callback.take
