"""The processes of a Trainer, without a Trainer."""

import os
import re
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_shard import DisagreementError, HybridShardStrategy
from lightning_shard.processes.mesh import sizes_of
from lightning_shard.processes.torch_private.internals import open_groups
from lightning_shard.trainer.process_mesh import (
    ProcessMesh,
    launcher_of,
    print_on_first_only,
    refuse_misfit,
    started_nodes,
    tell_ranks,
)
from lightning_shard.trainer.script_launchers import FabricScriptLauncher, SubprocessScriptLauncher
from tests.checkpoint import tiny
from tests.training import shared_path

CPU = torch.device("cpu")


def joined(*sizes, **options):
    processes = ProcessMesh(*sizes, **options)
    processes.join(TorchElasticEnvironment(), CPU)
    processes.arrange(CPU, per_node=dist.get_world_size())
    return processes


def test_places_before_there_is_a_mesh():
    processes = ProcessMesh("auto", (2, 3))
    assert processes.domain_size == 6
    assert [processes.replica(rank) for rank in (0, 5, 6, 13)] == [0, 0, 1, 2]
    assert [processes.domain_rank(rank) for rank in (0, 5, 6, 13)] == [0, 5, 0, 1]
    assert processes.data_group is None
    with pytest.raises(RuntimeError, match="known once the processes have joined"):
        _ = ProcessMesh(domain_parallel_size="auto").domain_size


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        (("auto", 1), {"data": 4, "domain": 1}),
        ((2, 2), {"data": 2, "domain": 2}),
        (("auto", (2, 2)), {"data": 1, "domain_0": 2, "domain_1": 2}),
        (("auto", "auto"), {"data": 1, "domain": 4}),
        ((2, "auto"), {"data": 2, "domain": 2}),
    ],
    ids=["4x1", "2x2", "1x(2x2)", "all", "what 2 replicas leave"],
)
def test_mesh_and_places_on_it(sizes, mesh):
    processes = joined(*sizes)
    made = processes.mesh
    assert made is not None
    assert sizes_of(made) == mesh
    rank, domain = dist.get_rank(), processes.domain_size
    assert (processes.replica(rank), processes.domain_rank(rank)) == divmod(rank, domain)
    assert dist.get_world_size(processes.data_group) == 4 // domain
    assert processes.domain_mesh.size() == domain
    assert processes.arrange(CPU, per_node=4) is made


@pytest.mark.spmd(4)
def test_parameters_shared_within_a_part_of_the_processes():
    halves = joined("auto", 1, shard_size=2)
    assert sizes_of(halves.mesh) == {"replicate": 2, "shard": 2, "domain": 1}
    assert sizes_of(joined("auto", 1, shard_size="node").mesh)["shard"] == 4


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            ("auto", (3, 2)),
            "domain_parallel_size 3 x 2 does not divide the 4 processes; use one of 1, 2, 4, or "
            "start a multiple of 6 processes, as devices=6 does.",
        ),
        (
            (3, 2),
            "data_parallel_size 3 x domain_parallel_size 2 is 6, not the 4 processes; use "
            "data_parallel_size 2 or auto.",
        ),
        ((4, (2, 2)), "4 x domain_parallel_size 2 x 2 is 16, not the 4 processes"),
        ((3, "auto"), "data_parallel_size 3 x domain_parallel_size 1 is 3, not the 4 processes"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_the_processes(sizes, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        joined(*sizes)


def test_an_option_that_there_is_not():
    with pytest.raises(TypeError, match=r"^ShardStrategy.*unexpected keyword argument 'domain'"):
        HybridShardStrategy(domain=2)


def test_a_domain_of_two_for_one_process():
    with pytest.raises(ValueError, match="2 does not divide the 1 process; use 1, or start a"):
        refuse_misfit(1, (2,), "auto")
    refuse_misfit(6, (3,), 2)
    refuse_misfit(6, (3, 2), "auto")


@pytest.mark.spmd(2)
def test_ranks_that_differ_all_hear_of_it():
    processes = joined("auto", 1)
    processes.compare("options", {"lr": "0.1"})
    with pytest.raises(DisagreementError, match=r"lr is 0 on rank 0 and 1 on rank 1"):
        processes.compare("options", {"lr": str(dist.get_rank())})


@pytest.mark.spmd(2)
def test_a_group_without_the_cpu_cannot_offload():
    processes = ProcessMesh()
    of_the_device_only = mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl")
    refused = pytest.raises(RuntimeError, match="make it with 'cpu:gloo,cuda:nccl'")
    with of_the_device_only, refused:
        processes.join(TorchElasticEnvironment(), CPU, offloads=True)


@pytest.mark.parametrize("launcher_class", [SubprocessScriptLauncher, FabricScriptLauncher])
def test_a_second_stage_starts_no_processes_again(launcher_class, monkeypatch):
    """As `trainer.test` after `trainer.fit`: the others run since the first stage."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", [__file__])
    launcher = launcher_class(LightningEnvironment(), 2, 1)
    with mock.patch("subprocess.Popen") as started:
        started.return_value.poll.return_value = started.return_value.returncode = 0
        assert launcher.launch(lambda: os.environ["LOCAL_RANK"]) == "0"
        assert launcher.launch(lambda x: x + 1, 2) == 3
    assert started.call_count == 1


@pytest.mark.parametrize("chosen", [None, "5"], ids=["cores", "by-the-user"])
def test_processes_that_a_trainer_starts_share_the_cores(chosen, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", [__file__])
    os.environ.pop("OMP_NUM_THREADS", None)
    if chosen is not None:
        os.environ["OMP_NUM_THREADS"] = chosen
    launcher = SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    cores = mock.patch("os.sched_getaffinity", return_value=range(6))
    with mock.patch("subprocess.Popen") as started, cores, mock.patch("torch.set_num_threads"):
        started.return_value.poll.return_value = started.return_value.returncode = 0
        here = launcher.launch(lambda: (torch.set_num_threads.call_args, [*os.environ.items()]))
    threads = chosen or "3"
    assert started.call_args.kwargs["env"]["OMP_NUM_THREADS"] == threads, "of the other process"
    assert here[0] == (None if chosen else mock.call(3))
    assert dict(here[1])["OMP_NUM_THREADS"] == threads


def test_who_starts_the_other_processes(monkeypatch):
    strategy, alone = HybridShardStrategy(), LightningEnvironment()
    assert launcher_of(strategy, alone, per_node=1, nodes=1) is None
    launcher = launcher_of(strategy, alone, per_node=2, nodes=1)
    assert isinstance(launcher, _SubprocessScriptLauncher)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    started = TorchElasticEnvironment()
    assert launcher_of(strategy, started, per_node=2, nodes=1) is None
    with pytest.raises(ValueError, match="the launcher started 2 processes"):
        launcher_of(strategy, started, per_node=4, nodes=1)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("callback", [ModelCheckpoint("none"), EarlyStopping("val_loss")])
def test_what_saves_or_stops_on_one_rank_alone(callback):
    """The other rank would wait in another collective."""
    mine = [callback] if dist.get_rank() else []
    saves = bool(mine) and isinstance(callback, ModelCheckpoint)
    with pytest.raises(
        DisagreementError, match=r"callbacks that save or stop is \[\] on rank 0 and"
    ):
        tiny.fit((2,), *mine, enable_checkpointing=saves)


@pytest.mark.spmd(2)
def test_what_saves_otherwise_on_one_rank():
    saver = ModelCheckpoint("none", save_last=bool(dist.get_rank()))
    with pytest.raises(DisagreementError, match=r"'save_last': False.* on rank 0 and .*True"):
        tiny.fit((2,), saver, enable_checkpointing=True)


def test_nodes_that_an_elastic_launcher_has_started(monkeypatch):
    assert started_nodes(LightningEnvironment(), per_node=2, nodes=3) == 3
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert started_nodes(TorchElasticEnvironment(), per_node=2, nodes=3) == 2
    assert started_nodes(TorchElasticEnvironment(), per_node=3, nodes=3) == 3  # refused later


def test_ranks_on_the_second_node(monkeypatch):
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "3")
    environment = LightningEnvironment()
    try:
        tell_ranks(environment, per_node=4, nodes=2)
        assert (environment.global_rank(), environment.world_size()) == (7, 8)
    finally:
        print_on_first_only(0)  # Lightning's environment has told its decorators


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_later_trainers_use_the_groups_of_the_first():
    """A group of gloo has a thread that wakes a hundred times a second."""
    folder, groups = shared_path("runs"), []
    for run in range(2):
        save = tiny.SaveAt(folder / f"{run}.ckpt", 2)
        _, _, module = tiny.fit((2,), save, max_steps=2, max_epochs=-1, checkpoint_format="async")
        with tiny.quiet():
            trainer = tiny.trainer((2,), checkpoint_format="async")
            trainer.test(module, tiny.loader(), verbose=False)
        groups.append(len(open_groups()))
    assert groups[0] == groups[1]
