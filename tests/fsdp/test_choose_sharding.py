"""Sharding "auto" keeps small networks whole, says so, and chooses alike on all ranks."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard import HybridShardStrategy, ShardingOptions
from lightning_shard.fsdp import choose_sharding as choosing
from lightning_shard.fsdp.choose_sharding import bytes_of_states, choose_sharding, memory_of_rank
from lightning_shard.memory import free
from tests import training
from tests.trainer.featured import Featured, assert_same_state, fit_alone, fit_sharded, loader

GIB = 2**30
CPU = torch.device("cpu")


def network():
    net = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1, bias=False))
    net[1].requires_grad_(False)
    net.register_parameter("phase", nn.Parameter(torch.zeros(500, dtype=torch.complex64)))
    return net


def test_bytes_of_states():
    assert bytes_of_states(network()) == 16 * 1_000_000 + 4 * 1000 + 2 * 16 * 500


@pytest.mark.parametrize(
    ("memory", "mode", "words"),
    [
        (80 * GIB, "none", "whole on each rank, 15.3 MiB of 80 GiB; sharding='full' shards them"),
        (16_020_000 * 20, "none", "whole on each rank"),
        (16_020_000 * 20 - 40, "full", "sharded over 1 ranks, together 15.3 MiB of 0 GiB"),
    ],
)
def test_a_twentieth_of_the_device(memory, mode, words):
    with mock.patch.object(choosing, "memory_of_rank", return_value=memory):
        chosen, sentence = choose_sharding(ShardingOptions(), network(), CPU)
    assert chosen == ShardingOptions(mode)
    assert words in sentence


def test_four_gib_at_most():
    with torch.device("meta"):
        large = nn.Linear(2**14, 2**14 + 1)
    with mock.patch.object(choosing, "memory_of_rank", return_value=1000 * GIB):
        assert choose_sharding(ShardingOptions(), large, CPU)[0].mode == "full"


@pytest.mark.parametrize(
    "option", [{"cpu_offload": True}, {"mp_policy": {"param_dtype": "bfloat16"}}]
)
def test_options_that_only_shards_serve(option):
    assert choose_sharding(ShardingOptions(**option), network(), CPU)[0].mode == "full"
    assert choose_sharding(ShardingOptions("hybrid"), network(), CPU)[0].mode == "hybrid"


def test_shards_to_offload_without_any():
    with pytest.raises(ValueError, match="cpu_offload keeps shards"):
        HybridShardStrategy(sharding=ShardingOptions("none", cpu_offload=True))


@pytest.mark.spmd(2)
def test_free_memory_is_divided_by_the_processes_of_a_machine():
    with mock.patch.object(choosing, "free_here", return_value=(10 * GIB, "")):
        assert memory_of_rank(CPU) == 5 * GIB


@pytest.mark.quick_rows("1", "None")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("scarce", [0, 1, None])
def test_all_ranks_choose_alike_and_say_it(scarce, monkeypatch):
    """By the rank that has least memory."""
    said = []
    monkeypatch.setattr("lightning_shard.trainer.strategy.rank_zero_info", said.append)
    own = 1000 if dist.get_rank() == scarce else 80 * GIB
    monkeypatch.setattr(choosing, "memory_of_rank", lambda _: own)
    alone, module = Featured(), Featured()
    fit_alone(alone)
    runner = fit_sharded(module, (2,))
    assert_same_state(module, alone)
    whole = scarce is None
    assert isinstance(module.network[0].weight, DTensor) is not whole
    assert runner.strategy.sharding_options.mode == ("none" if whole else "full")
    assert [line.startswith("parameters: ") for line in said] == [True]
    assert ("sharding='full'" if whole else "sharding='none'") in said[0]


@pytest.mark.quick_rows("none-full")
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("first", "second"), [("none", "full"), ("full", "none"), ("none", "none")]
)
def test_checkpoints_of_one_mode_go_on_in_the_other(first, second):
    path = training.shared_path("half.ckpt")
    alone, module = Featured(), Featured()
    fit_alone(alone, max_epochs=2)
    begun = fit_sharded(module, (2,), strategy={"sharding": first})
    begun.save_checkpoint(path)
    resumed = Featured()
    runner = training.trainer((2,), max_epochs=2, strategy={"sharding": second})
    runner.fit(resumed, loader(4), loader(4), ckpt_path=path)
    assert_same_state(resumed, alone)
    own = torch.load(path, weights_only=False)["lightning_shard"]
    assert own["sharding"] == first


@pytest.mark.quick_rows("none")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("first", ["none", "full"])
def test_a_resumed_run_takes_the_mode_of_the_run_before(first, monkeypatch):
    """Although the free memory is another one now."""
    path = training.shared_path("half.ckpt")
    fit_sharded(Featured(), (2,), strategy={"sharding": first}).save_checkpoint(path)
    memory = 1000 if first == "none" else 80 * GIB
    monkeypatch.setattr(choosing, "memory_of_rank", lambda _: memory)
    runner = training.trainer((2,), max_epochs=2)
    runner.fit(Featured(), loader(4), loader(4), ckpt_path=path)
    assert runner.strategy.sharding_options.mode == first


def test_a_container_has_no_more_than_its_limit(monkeypatch):
    """The memory of the machine is larger, and another container's."""
    found = [("in this machine", 80 * GIB), ("within the limit of this cgroup", 4 * GIB)]
    monkeypatch.setattr(free, "limits", lambda: iter(found))
    assert memory_of_rank(CPU) == 4 * GIB
    monkeypatch.setattr(free, "limits", lambda: iter(()))
    assert memory_of_rank(CPU) > 0
