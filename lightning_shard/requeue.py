"""A SLURM job that is to be queued again saves its checkpoint between two steps, on all ranks.

Lightning 2.6 saves in the signal's handler, wherever each rank is just then; saving is collective,
so a rank in another collective would wait for ever or mix up what it receives.
"""

import signal
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class SaveBeforeRequeue(Callback):
    """Notes the signal, and does what Lightning does once all ranks have ended the step."""

    def __init__(self) -> None:
        self._asked = False

    def note(self, *_: Any) -> None:
        """Handle the signal."""
        self._asked = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        asked = torch.tensor(float(self._asked), device=trainer.strategy.root_device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)  # ranks hear of it at different times
        if asked:
            self._asked = False
            trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # pyright: ignore[reportArgumentType]


def save_before_requeue(trainer: Trainer, environment: Any) -> None:
    """Take the signal before Lightning does, which leaves one that has a handler alone."""
    callbacks: list[Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    if not (isinstance(environment, SLURMEnvironment) and environment.auto_requeue):
        return
    if any(isinstance(callback, SaveBeforeRequeue) for callback in callbacks):
        return
    wanted = environment.requeue_signal
    if wanted is not None and signal.getsignal(wanted) is signal.SIG_DFL:
        callback = SaveBeforeRequeue()
        callbacks.append(callback)
        signal.signal(wanted, callback.note)
