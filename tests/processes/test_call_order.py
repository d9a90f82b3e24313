"""Ranks that have called different functions, and wait for each other, end with a sentence."""

import time
import warnings
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException

import lightning_shard
from lightning_shard import launch
from lightning_shard.processes.failures import lone_waits
from lightning_shard.processes.failures.call_order import CallOrder
from lightning_shard.processes.failures.failure_watch import watch_ranks
from lightning_shard.tensor.calls import Calls
from tests import training
from tests.trainer.featured import Featured, loader

LOOKS = {
    "Tensor.max": lambda y, rank: rank or float(y.detach().max()),
    "lightning_shard.gather": lambda y, rank: rank or lightning_shard.gather(y.detach()),
    "Tensor.mean": lambda y, rank: rank or y.detach().mean(),
    "Tensor.flip [-1]": lambda y, rank: y.flip(-1 - rank),
}


class Looks(Featured):
    """Rank 0 alone looks at a result, in the second step, as to print it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def loss(self, batch):
        y = self(batch["x"])
        if self.trainer.global_step or "[" in self.kind:  # numbers are read in the first step
            LOOKS[self.kind](y, self.global_rank)
        return (y - batch["y"]).square().mean()


class LooksLate(Featured):
    """Rank 0 alone looks after the loss, while rank 1 waits in `log`, which calls no function."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        y = self(batch["x"])
        if self.trainer.global_step and self.global_rank == 0:
            float(y.detach().std())
        self.log("later", loss, sync_dist=True)
        return loss


def fit(kind):
    lone_waits.LOOK_S, lone_waits.ORDER_S = 0.2, 1.0
    warnings.simplefilter("ignore")
    training.trainer((2,), limit_val_batches=0).fit(Looks(kind), loader(4, 8))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] if kind != "Tensor.max" else [])
        for kind in LOOKS
    ],
)
def test_a_rank_that_looks_alone_in_a_step(kind, capfd):
    with pytest.raises(ProcessExitedException):
        launch(fit, kind, processes=2, timeout_s=60)
    words = capfd.readouterr().err
    other = "Tensor.flip [-2]" if "[" in kind else "Tensor.sub"
    calls = [(0, kind, 1, other), (1, other, 0, kind)]
    assert any(
        f"[rank {here}] ended, because it has called {mine} on split tensors where rank {there}, "
        f"with which it shares its samples, has called {others}, and one waits" in words
        for here, mine, there, others in calls
    ), words


def fit_late(sharding):
    lone_waits.LOOK_S, lone_waits.ORDER_S, lone_waits.STUCK_S = 0.2, 0.5, 1.0
    warnings.simplefilter("ignore")
    runner = training.trainer((2,), limit_val_batches=0, strategy={"sharding": sharding})
    runner.fit(LooksLate(), loader(4, 8))


@pytest.mark.parametrize("sharding", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_a_rank_that_looks_alone_after_the_last_common_function(sharding, capfd):
    with pytest.raises(ProcessExitedException):
        launch(fit_late, sharding, processes=2, timeout_s=60)
    assert (
        "[rank 0] ended, because it has called Tensor.std on split tensors, and rank 1, with which "
        "it shares its samples, has not. Let all of these ranks" in capfd.readouterr().err
    )


def end_with_a_reason():
    watch = watch_ranks(dist.get_rank(), timeout_s=60)
    if dist.get_rank() == 1:
        with mock.patch("os._exit") as end:
            lone_waits._end(1, "it waits at net.py:7")
        end.assert_called_once_with(1)
    deadline = time.monotonic() + 8
    while watch.heard is None and time.monotonic() < deadline:
        time.sleep(0.05)
    heard = watch.heard
    watch.close()
    return None if heard is None else heard.text


def test_all_ranks_hear_why_one_ends():
    """Else they say that it ended without a word, and its own log may be on another machine."""
    told = launch(end_with_a_reason, processes=3, timeout_s=60)
    assert told == ["rank 1: it waits at net.py:7"] * 3


def calls_of(*functions, begun=0):
    calls = Calls()
    for _ in range(begun):
        calls.clear()
    for function in functions:
        calls.note(function, (), {})
    return calls.latest


def difference(here, there):
    """What rank 0 says while it waits, after rank 1 has."""
    store = dist.HashStore()
    own, other = CallOrder(0, [0, 1], here), CallOrder(1, [0, 1], there)
    assert other.difference(store, "call") is None
    found = own.difference(store, "call")
    assert not own.ahead  # rows for the other rank may still travel
    return found


def ahead(here, there, *, waits="call", other_waits=""):
    """What rank 0 says once all ranks wait."""
    store = dist.HashStore()
    own, other = CallOrder(0, [0, 1], here), CallOrder(1, [0, 1], there)
    assert other.difference(store, other_waits) is None
    assert own.difference(store, waits) is None
    return own.ahead


def test_a_rank_may_wait_in_a_call_to_which_another_does_not_come():
    a, b = torch.relu, torch.abs
    assert "called torch.abs on split tensors, and rank 1" in ahead(calls_of(a, b, a), calls_of(a))
    assert not ahead(calls_of(a, b), calls_of(a, b))
    assert not ahead(calls_of(a), calls_of(a, b))  # the other rank is, and says so
    assert not ahead(calls_of(a, b), calls_of(a), waits="")
    assert not ahead(calls_of(a, b), calls_of(a), other_waits="call")
    assert not ahead(calls_of(a, b), calls_of(a), other_waits="barrier")  # it will say why
    assert not ahead(calls_of(a, b), calls_of(a, begun=1))
    assert not ahead(calls_of(*[a] * 1200), calls_of(a))  # what came next is forgotten


def test_only_another_order_is_a_difference():
    a, b = torch.relu, torch.abs
    assert difference(calls_of(a, b), calls_of(a, b)) is None
    assert difference(calls_of(a), calls_of(a, b)) is None  # rank 1 has gone on
    assert difference(calls_of(b), calls_of(a, begun=1)) is None  # in another epoch
    assert "called torch.relu on split tensors where rank 1" in difference(
        calls_of(b, a), calls_of(b, b)
    )
    many = [a] * 1200
    assert difference(calls_of(b, *many), calls_of(a, *many)) is None  # forgotten
    assert difference(calls_of(a, *many, b), calls_of(*many, a, a)) is not None


def test_a_call_is_told_once_all_of_it_is_noted():
    """The thread that looks may run while the rank goes on; half a call would be another one."""
    calls, seen = Calls(), []
    calls.reads_numbers = True

    class LooksWhileRead(tuple):
        def __iter__(self):
            seen.append(calls.latest())
            return super().__iter__()

    calls.note(torch.flip, (LooksWhileRead([2]),), {})
    assert seen
    assert all(number == len(words) == 0 for _, number, words in seen)
    assert calls.latest() == (0, 1, ["torch.flip [2]"])


def test_a_rank_that_only_looks_has_called_nothing():
    here = calls_of(torch.relu, torch.Tensor.detach, torch.Tensor.clone, torch.abs)
    assert difference(here, calls_of(torch.relu, torch.abs)) is None


def test_a_rank_that_goes_on_takes_back_what_it_has_told():
    """Else the next epoch of another rank would be compared with this one."""
    store = dist.HashStore()
    own, other = (
        CallOrder(rank, [0, 1], calls_of(f)) for rank, f in enumerate([torch.relu, torch.abs])
    )
    assert other.difference(store, "") is None
    other.forget(store)
    other.forget(store)
    assert own.difference(store, "call") is None
    assert not own.ahead
