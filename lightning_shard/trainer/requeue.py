"""Saves a SLURM job that is to be queued again between two steps, on all ranks.

Lightning 2.6 saves in the signal's handler, wherever each rank is just then; saving is collective,
so a rank in another collective would wait for ever or mix up what it receives.
"""

import signal
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_shard.lightning import Callback, LightningModule, SLURMEnvironment, Trainer
from lightning_shard.trainer.host import add_once, begin_requeue


class SaveBeforeRequeue(Callback):
    """Notes the signal, and saves as Lightning does once all ranks have ended the step."""

    def __init__(self, wanted: signal.Signals) -> None:
        """Wait for the signal `wanted`."""
        self._signal, self._asked = wanted, False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the signal before Lightning does, which leaves one that has a handler alone."""
        handler = signal.getsignal(self._signal)
        of_older = isinstance(getattr(handler, "__self__", None), SaveBeforeRequeue)
        if of_older or handler is signal.SIG_DFL:
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
            begin_requeue(trainer, self._signal)


def save_before_requeue(trainer: Trainer, environment: Any) -> None:
    """Let all ranks save together in a job of SLURM that Lightning may queue again."""
    if not isinstance(environment, SLURMEnvironment) or environment.requeue_signal is None:
        return
    if environment.auto_requeue:
        add_once(trainer, SaveBeforeRequeue(environment.requeue_signal))
