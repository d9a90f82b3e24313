"""StepProfile: the trace of all ranks, the table, and what is left when a step fails."""

import contextlib
import gzip
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_shard import DomainTensor, StepProfile
from lightning_shard.trainer.profile.traffic import counted
from tests.checkpoint.tiny import fit, tiny
from tests.training import shared_path


class CountedSteps(Callback):
    """Counts what this rank sends from the end of the batch before `first` to that of `last`."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.first:
            self.open = counted()
            self.traffic = self.open.__enter__()
        if trainer.global_step == self.last + 1:
            self.open.__exit__(None, None, None)


def untouched() -> tuple:
    return (
        vars(DomainTensor)["__torch_function__"], dist.Work.wait, dist.all_reduce,
        len(tiny().first._forward_hooks),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_one_trace_of_two_ranks():
    before, folder = untouched(), shared_path("logs")
    profile, plain = StepProfile(wait=2, warmup=1, active=2), CountedSteps(3, 4)
    module = tiny()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fit((2,), profile, module=module, default_root_dir=folder)
    assert untouched() == before
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in (module.dropout,))
    fit((2,), plain, default_root_dir=folder)
    dist.barrier()
    for rank in range(2):
        path = Path(folder) / f"profile_rank_{rank}.json.gz"
        names = [e["name"] for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
        assert "module norm" in names
        assert "split window torch.conv1d" in names
        assert any(name.startswith("collective ") for name in names)
    assert profile.traffic == plain.traffic
    printed = out.getvalue()
    if dist.get_rank() == 0:
        assert profile.usage["second"].compute_us > 0
        assert profile.usage["second"].waiting_us > 0
        assert profile.usage["second"].calls == 2  # forward and backward
        assert sum(u.bytes for u in profile.usage.values()) == plain.traffic.bytes / 2
        assert {"first", "norm", "second", "(optimizer)", "(training_step)"} <= profile.usage.keys()
        assert sum(u.calls for u in profile.usage.values()) == plain.traffic.calls / 2
        assert "module" in printed
        assert profile.path in printed
    else:
        assert printed == ""


class FailsOn(Callback):
    """Fails on rank 1 in a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == self.batch and trainer.global_rank == 1:
            raise ZeroDivisionError("on purpose")
        if trainer.global_step == self.batch:
            raise KeyError("the other rank, which would wait")


@pytest.mark.quick_rows("3")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("batch", [2, 3])
def test_a_failure_leaves_nothing_behind(batch):
    """While warming up and while recording."""
    before, profile, module = untouched(), StepProfile(wait=2, warmup=1, active=2), tiny()
    expected = ZeroDivisionError if dist.get_rank() else KeyError
    with pytest.raises(expected):
        fit((2,), profile, FailsOn(batch), module=module)
    assert untouched() == before
    assert not module.first._forward_hooks
    assert not module.first._forward_pre_hooks
    assert profile.path is None
    with torch.profiler.profile():  # torch refuses a second one
        torch.ones(1)


def test_a_run_that_is_too_short(tmp_path):
    profile = StepProfile(wait=20)
    with pytest.warns(UserWarning, match="ended after 12 batches, and number 22 is the first"):
        fit((1,), profile, default_root_dir=tmp_path)
    assert profile.path is None


def test_a_run_that_ends_while_recording(tmp_path):
    profile = StepProfile(wait=9, warmup=1, active=9)
    fit((1,), profile, default_root_dir=tmp_path)
    assert Path(profile.path).is_file()
    assert profile.usage["first"].compute_us > 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"active": 0}, "active must be a whole number from 1 on; got 0."),
        ({"wait": -1}, "wait must be a whole number from 0 on; got -1."),
        ({"warmup": 1.5}, "warmup must be a whole number from 0 on; got 1.5."),
    ],
)
def test_steps_that_cannot_be(arguments, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        StepProfile(**arguments)


def test_beside_the_profiler_of_lightning():
    trainer = SimpleNamespace(profiler=mock.Mock(spec=PyTorchProfiler))
    with pytest.raises(ValueError, match="give the Trainer one of them"):
        StepProfile().setup(trainer, tiny(), "fit")
