"""Ranks of a script that wait for each other at different places end with a sentence."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import ProcessExitedException

import lightning_shard
from lightning_shard import launch
from lightning_shard.processes.failures import lone_waits


def draw_alone(sharding):
    lone_waits.LOOK_S, lone_waits.STUCK_S = 0.2, 1.0
    mesh = lightning_shard.init_mesh({"domain": -1})
    network = nn.Conv2d(1, 1, 3, padding=1)
    options = lightning_shard.ShardingOptions(sharding)
    lightning_shard.parallelize(network, mesh, options=options)
    x = lightning_shard.shard(torch.randn(1, 1, 8, 4), mesh, dims=2)
    network(x).square().mean().backward()
    if dist.get_rank() == 0:
        network(x)
    dist.barrier()


@pytest.mark.parametrize("sharding", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_a_rank_that_draws_alone_in_a_loop_of_the_user(sharding, capfd):
    with pytest.raises(ProcessExitedException):
        launch(draw_alone, sharding, processes=2, timeout_s=60)
    words = capfd.readouterr().err
    assert "[rank 0] ended, because it waits at " in words
    assert "test_lone_waits.py:23 for rows or parameters of rank 1, which waits at" in words
    assert "test_lone_waits.py:24: a split tensor and a sharded module must be used on all" in words


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
