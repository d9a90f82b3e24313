"""Ranks hear at different times that SLURM will queue their job again; they save together."""

import os
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback

from tests.checkpoint.test_interrupted import EVERY, MOMENTS, RANKS, Interrupt
from tests.checkpoint.test_resume_after_a_step import run
from tests.training import shared_path

SCONTROL = '#!/bin/sh\necho "$@" >> "$(dirname "$0")/queued"\n'


class Queued(TorchElasticEnvironment, SLURMEnvironment):
    """A job of SLURM that Lightning may queue again; torchrun's variables number the ranks."""

    def __init__(self):
        SLURMEnvironment.__init__(self, auto_requeue=True)


class NoteSaves(Callback):
    def __init__(self):
        self.at = []

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.at.append((len(module.noted), checkpoint["global_step"]))


def train(domain, folder, *callbacks):
    path = f"{folder}:{os.environ['PATH']}"
    with (
        mock.patch("tests.training.TorchElasticEnvironment", Queued),
        mock.patch.object(SLURMEnvironment, "detect", return_value=True),
        mock.patch.dict(os.environ, {"PATH": path, "SLURM_JOB_ID": "7"}),
    ):
        return run(domain, [*callbacks], EVERY, default_root_dir=folder)


@pytest.mark.quick_rows("second-2-in a step")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("moment", [*MOMENTS.keys() - {"while saving"}])
@pytest.mark.parametrize("domain", [2, 1])
@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_save_between_the_same_batches(ranks, domain, moment):
    folder, saves, before = shared_path(""), NoteSaves(), signal.getsignal(signal.SIGUSR1)
    whole, state, numbers = run((domain,), [Callback()], EVERY)
    if not (scontrol := folder / "scontrol").exists():
        scontrol.write_text(SCONTROL)
        scontrol.chmod(0o755)
    strike = Interrupt(*MOMENTS[moment], ranks=RANKS[ranks], numbers=[signal.SIGUSR1])
    assert train((domain,), folder, strike, saves)[0] == whole  # it goes on
    assert signal.getsignal(signal.SIGUSR1) is before
    dist.barrier()
    assert (folder / "queued").read_text() == "requeue 7\n"
    ((seen, step),) = saves.at
    assert torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"] == step
    while whole[seen - 1][0] == "validation":  # it is run again from its first batch
        seen -= 1
    again, resumed, resumed_numbers = train((domain,), folder)
    assert again == whole[seen:]
    assert resumed_numbers == numbers or not again
    for key, value in state.items():
        assert torch.equal(resumed[key], value), key
