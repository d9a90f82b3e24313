"""The signal before a job is queued again reaches ranks at different times; all save together."""

import os
import signal
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

from lightning_shard.trainer.requeue import SaveBeforeRequeue, save_before_requeue
from tests.training import loader, make, trainer


class SignalOnSecondRank(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def note_step(runner, steps, *_):
    steps.append(runner.global_step)


@pytest.mark.spmd(2)
def test_all_ranks_save_after_the_same_step():
    before = signal.getsignal(signal.SIGUSR1)
    try:
        for _ in range(2):  # a second Trainer of the process, too
            saved = []
            runner = trainer((2,), callbacks=[SignalOnSecondRank()])
            environment = mock.Mock(SLURMEnvironment, auto_requeue=True)
            environment.requeue_signal = signal.SIGUSR1
            save_before_requeue(runner, environment)
            take = save_before_requeue(runner, environment)
            assert sum(isinstance(c, SaveBeforeRequeue) for c in runner.callbacks) == 1
            # as Lightning does in a job of SLURM
            signal.signal(signal.SIGUSR1, _HandlersCompose([partial(note_step, runner, saved)]))
            take()
            data = loader("simple_cnn", torch.float32, 2, 8)
            runner.fit(make("simple_cnn", torch.float32), data)
            assert saved == [2]
    finally:
        signal.signal(signal.SIGUSR1, before)
