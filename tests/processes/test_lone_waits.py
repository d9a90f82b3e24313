"""Ranks of a script that wait for each other at different places end with a sentence."""

import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import lightning_shard
from lightning_shard import UnsupportedOperationError, launch
from lightning_shard.fsdp import same_blocks
from lightning_shard.fsdp.plain_gradients import plain_gradients_of
from lightning_shard.fsdp.unused_parameters import unused_parameters_of
from lightning_shard.processes.failures import lone_waits
from tests import training
from tests.trainer.featured import Featured, loader


def draw_alone(sharding, extent):
    lone_waits.LOOK_S, lone_waits.STUCK_S = 0.2, 1.0
    mesh = lightning_shard.init_mesh({"domain": -1})
    network = nn.Conv2d(1, 1, 3, padding=1)
    options = lightning_shard.ShardingOptions(sharding)
    lightning_shard.parallelize(network, mesh, options=options)
    x = lightning_shard.shard(torch.randn(1, 1, extent, extent), mesh, dims=2)
    network(x).square().mean().backward()
    if dist.get_rank() == 0:
        network(x)
    dist.barrier()


# the rows of a large field travel while others are computed
@pytest.mark.parametrize("extent", [8, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sharding", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_a_rank_that_draws_alone_in_a_loop_of_the_user(sharding, extent, capfd):
    with pytest.raises(ProcessExitedException):
        launch(draw_alone, sharding, extent, processes=2, timeout_s=60)
    words = capfd.readouterr().err
    line = draw_alone.__code__.co_firstlineno + 9
    assert "[rank 0] ended, because it waits at " in words
    inside = " (in conv)" if sharding == "none" else ""
    assert f":{line}{inside} for rows or parameters of rank 1, which waits at" in words
    assert f"test_lone_waits.py:{line + 1}: a split tensor and a sharded module must be" in words


def wait_for_those_that_ended(ended):
    lone_waits.LOOK_S, lone_waits.STUCK_S, lone_waits.ENDED_S = 0.2, 0.5, 1.0
    lone_waits.ended_among = lambda store, ranks: ended  # as Linux would say of processes
    lightning_shard.init_mesh({"domain": -1})
    if dist.get_rank() > 0:
        time.sleep(4 if ended != [1, 2] else 20)
    dist.barrier()
    return True


def test_a_rank_does_not_wait_for_ranks_that_have_ended(capfd):
    assert launch(wait_for_those_that_ended, [1], processes=3, timeout_s=60) == [True] * 3
    with pytest.raises(ProcessExitedException):
        launch(wait_for_those_that_ended, [1, 2], processes=3, timeout_s=60)
    words = capfd.readouterr().err
    line = wait_for_those_that_ended.__code__.co_firstlineno + 6
    assert "[rank 0] ended, because it waits at " in words
    assert f"test_lone_waits.py:{line}, and all other ranks have come to the end" in words


def test_a_rank_that_goes_on_again_is_not_waited_for():
    """It takes back where it waited while others read that."""
    store = dist.HashStore()
    store.set("lone_waits/0", '[true, "net.py:7", false]')
    assert lone_waits.where_ranks_wait(store, [0, 1]) == []
    store.set("lone_waits/1", '[false, "net.py:9", false]')
    waits = [[True, "net.py:7", False], [False, "net.py:9", False]]
    assert lone_waits.where_ranks_wait(store, [0, 1]) == waits
    store.set("lone_waits/1", "")
    assert lone_waits.where_ranks_wait(store, [0, 1]) == []


def take_turns():
    lone_waits.LOOK_S, lone_waits.STUCK_S = 0.1, 0.5
    mesh = lightning_shard.init_mesh({"domain": -1})
    x = lightning_shard.shard(torch.randn(1, 1, 8, 4), mesh, dims=2)
    if dist.get_rank() == 0:
        lone_waits.time.sleep(2)  # it computes, and the others wait for it
    x.sum()
    dist.barrier()


def test_a_rank_that_computes_is_waited_for():
    launch(take_turns, processes=2, timeout_s=60)


def words_of_the_end(function, capfd, *given):
    """What ranks print that are ended."""
    with pytest.raises(ProcessExitedException):
        launch(function, *given, processes=2, timeout_s=60)
    return capfd.readouterr().err


def network_and_field(sharding):
    mesh = lightning_shard.init_mesh({"domain": -1})
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1))
    options = lightning_shard.ShardingOptions(sharding)
    lightning_shard.parallelize(network, mesh, options=options)
    x = lightning_shard.shard(torch.randn(1, 1, 8, 4), mesh, dims=2)
    return network, x


def detach_a_loss_on_one_rank(sharding):
    same_blocks.LOOK_S, lone_waits.LOOK_S, lone_waits.STUCK_S = 0.1, 0.2, 1.0
    network, x = network_and_field(sharding)
    backwards = plain_gradients_of(network) or unused_parameters_of(network)
    for step in range(3):
        loss = network(x).square().mean()
        if step == 1 and dist.get_rank() == 0:
            loss = loss.detach().requires_grad_()
        with backwards.one_backward():  # as in the Trainer
            loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_loss_that_is_detached_on_one_rank(sharding):
    """By default tests/fsdp/test_plain_gradients.py has what rank 0 says."""
    does = {
        "none": "waits for the others' gradients: its loss reaches no parameter",
        "full": "ends a backward pass in which its loss reaches no parameter",
    }
    line = detach_a_loss_on_one_rank.__code__.co_firstlineno + 9
    waits = f"rank 1 waits at {__file__}:{line} for what does not come; let all ranks"
    with pytest.raises(ProcessRaisedException, match=f"rank 0 {does[sharding]}, where {waits}"):
        launch(detach_a_loss_on_one_rank, sharding, processes=2, timeout_s=60)


def detach_a_loss_in_a_loop_of_the_user(sharding):
    lone_waits.LOOK_S, lone_waits.STUCK_S, lone_waits.APART_S = 0.2, 0.5, 2.0
    network, x = network_and_field(sharding)
    for step in range(3):
        loss = network(x).square().mean()
        if step == 1 and dist.get_rank() == 0:
            loss = loss.detach().requires_grad_()
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_loss_that_is_detached_in_a_loop_of_the_user(sharding, capfd):
    words = words_of_the_end(detach_a_loss_in_a_loop_of_the_user, capfd, sharding)
    line = detach_a_loss_in_a_loop_of_the_user.__code__.co_firstlineno + 4
    at = [f"waits at {__file__}:{line}", f"waits at {__file__}:{line + 3}"]
    assert "ended, because it waits at " in words
    assert all(place in words for place in at), words
    assert "losses that reach parameters on all." in words


class Detaches(Featured):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss.detach().requires_grad_() if batch_idx and not self.global_rank else loss


def fit_with_a_loss_detached():
    same_blocks.LOOK_S, lone_waits.LOOK_S, lone_waits.STUCK_S = 0.1, 0.2, 1.0
    warnings.simplefilter("ignore")  # a launched rank begins with pytest's filters
    training.trainer((2,), strategy={"sharding": "full"}).fit(Detaches(), loader(2, 8))


@pytest.mark.slow
def test_a_loss_that_is_detached_on_one_rank_of_a_trainer():
    with pytest.raises(ProcessRaisedException, match=r"reaches no parameter, where rank 1 waits"):
        launch(fit_with_a_loss_detached, processes=2, timeout_s=60)


def refuse_a_thread_on_one_rank():
    lone_waits.LOOK_S, lone_waits.REFUSED_S = 0.2, 1.0
    mesh = lightning_shard.init_mesh({"domain": -1})
    x = lightning_shard.shard(torch.randn(5, 3), mesh, 0)
    x.sum()
    begun, done = threading.Event(), list[bool]()

    def second():
        begun.wait()
        with pytest.raises(UnsupportedOperationError, match="two threads use split tensors"):
            x.mean()
        done.append(True)

    if dist.get_rank() == 0:
        threading.Thread(target=second, daemon=True).start()
        begun.set()
        while not done:  # this thread works
            pass
        lone_waits.time.sleep(60)  # it does not end, so the others keep their connections
    x.sum()


@pytest.mark.slow
def test_a_rank_waits_for_one_that_has_refused_a_thread(capfd):
    words = words_of_the_end(refuse_a_thread_on_one_rank, capfd)
    assert "[rank 1] ended, because two threads use split tensors at once" in words
    assert words.count("ended, because") == 1


def use_a_thread_on_one_rank():
    lone_waits.LOOK_S, lone_waits.REFUSED_S, lone_waits.STUCK_S = 0.2, 1.0, 1.0
    mesh = lightning_shard.init_mesh({"domain": -1})
    x = lightning_shard.shard(torch.randn(5, 3), mesh, 0)

    def draw():
        time.sleep(0.5)  # until the first thread waits; one that works would be another refusal
        with pytest.raises(UnsupportedOperationError, match="must use them in that thread"):
            x.mean()

    if dist.get_rank() == 0:
        thread = threading.Thread(target=draw, name="draw")
        thread.start()
        thread.join()
        lone_waits.time.sleep(60)
    x.sum()


def test_a_thread_on_one_rank_alone(capfd):
    words = words_of_the_end(use_a_thread_on_one_rank, capfd)
    assert "[rank 1] ended, because rank 0 uses split tensors in the thread 'draw', and" in words
    assert words.count("ended, because") == 1


class OfTwoModes(Featured):
    """Its norm is in eval mode on one rank, which sums nothing over the ranks."""

    def __init__(self):
        super().__init__(norm=nn.BatchNorm2d)

    def training_step(self, batch, batch_idx):
        self.network[1].train(batch_idx == 0 or self.global_rank > 0)
        return self.loss(batch)


class SpeaksAlone(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero:
            dist.barrier()


def fit_on_ranks_that_part(kind):
    lone_waits.LOOK_S, lone_waits.STUCK_S, lone_waits.IN_TRAINER_S = 0.2, 1.0, 3.0
    warnings.simplefilter("ignore")
    module, alone = (OfTwoModes(), []) if kind == "modes" else (Featured(), [SpeaksAlone()])
    training.trainer((2,), callbacks=alone).fit(module, loader(2, 8))


@pytest.mark.parametrize("kind", ["modes", pytest.param("a barrier", marks=pytest.mark.slow)])
def test_ranks_of_a_trainer_that_wait_for_each_other(kind, capfd):
    """They would end after `timeout_s`, half an hour, with an error of gloo."""
    words = words_of_the_end(fit_on_ranks_that_part, capfd, kind)
    assert "ended, because it waits at " in words
    assert "for rows or parameters of rank" in words
    assert ("(in batch_norm)" if kind == "modes" else __file__) in words
