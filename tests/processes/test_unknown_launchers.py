"""A process that was started as one of several is never taken for one alone."""

import os
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment

from lightning_shard import process_info
from lightning_shard.processes.process_info import CHOICE, LAUNCHERS
from lightning_shard.trainer.environment import LauncherEnvironment, environment_of_launcher
from tests.processes.test_process_info import (
    FLUX_RUN,
    HYDRA,
    JSRUN,
    OPENMPI,
    PALS,
    PMI,
    SLURM,
)
from tests.processes.test_process_info import environment as environment

OUTER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "host", "MASTER_PORT": "2000"}


@pytest.fixture
def nodes(tmp_path):
    """The file of a job's hosts, a line for each process that may run there."""
    file = tmp_path / "nodes"
    file.write_text("x1001\nx1001\nx1002\nx1002\n")
    return {"PBS_NODEFILE": str(file), "PBS_JOBID": "17.pbs"}


@pytest.fixture
def _no_mpi4py(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)


def mpi(monkeypatch, rank, size):
    """An mpi4py that a program has imported."""
    world = SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: size)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(COMM_WORLD=world))


def test_every_row_has_a_source():
    own = ("notebook", "environment", "lightning")
    assert all(row.source for row in LAUNCHERS if row.name not in own)


def test_pals_counts_the_processes_by_the_hosts_of_the_job(environment, nodes):
    environment(PALS | nodes)
    found = process_info()
    assert (found.launcher, found.rank, found.world_size) == ("pals", 3, 4)
    assert (found.local_rank, found.local_world_size, found.node) == (1, 2, 1)
    assert found.address == "x1001"
    ports = {found.port}
    environment({"PALS_RANKID": "2", "PALS_LOCAL_RANKID": "0", "PMIX_RANK": "2"})
    ports.add(process_info().port)
    assert len(ports) == 1
    environment({"PALS_APID": "another"})  # a second mpiexec in the same job
    assert process_info().port not in ports


def test_pals_believes_mpi_that_runs(environment, monkeypatch, nodes):
    """Also where mpiexec was told to use fewer hosts than the job has."""
    environment(PALS | nodes | {"PALS_RANKID": "1", "PMIX_RANK": "1", "PALS_NODEID": "0"})
    mpi(monkeypatch, rank=1, size=2)
    assert process_info().world_size == 2
    mpi(monkeypatch, rank=0, size=1)  # another MPI than the launcher's
    assert process_info().world_size == 4


@pytest.mark.usefixtures("_no_mpi4py")
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        (PALS | {"PALS_NODEID": "0"}, "PALS_RANKID"),
        ({"PALS_RANKID": "0"}, "PALS_LOCAL_RANKID and PALS_LOCAL_SIZE"),
        ({"PMIX_RANK": "0"}, "set WORLD_SIZE"),
        ({"ALPS_APP_PE": "0"}, "set WORLD_SIZE"),
        ({"FLUX_TASK_RANK": "0"}, "FLUX_JOB_SIZE"),
        ({"JSM_NAMESPACE_RANK": "0"}, "JSM_NAMESPACE_SIZE"),
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        ({"MV2_COMM_WORLD_RANK": "0"}, "MV2_COMM_WORLD_SIZE"),
        ({"NEW_RANKID": "0"}, "nothing tells how many there are"),
        ({"NEW_TASK_RANK": "0"}, "nothing tells how many there are"),
        ({"HOROVOD_RANK": "0"}, "nothing tells how many there are"),
        ({"OMPI_COMM_WORLD_NODE_RANK": "0"}, "nothing tells how many there are"),
        ({"HOROVOD_LOCAL_RANK": "0"}, "nothing tells how many there are"),
        ({"GROUP_RANK": "0"}, "RANK and WORLD_SIZE are not set"),
        ({"GROUP_RANK": "0", "WORLD_SIZE": "1"}, "but RANK is not set"),
        ({"PALS_NODEID": "0"}, "PALS_RANKID"),
        ({"PMIX_SIZE": "2"}, "PMIX_RANK"),
        ({"NODE_RANK": "0", "PMIX_RANK": "0"}, "set WORLD_SIZE"),
        ({"NODE_RANK": "0", "GROUP_RANK": "0"}, "RANK and WORLD_SIZE are not set"),
        ({"NODE_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ({"NODE_RANK": "0", "NEW_RANKID": "0"}, "nothing tells how many there are"),
    ],
    ids="pals pals-rank pmix alps flux jsrun pmi mvapich rankid task-rank horovod openmpi-node "
    "horovod-local group group-world pals-node pmix-size node-pmix node-group node-openmpi "
    "node-rankid".split(),
)
def test_a_sign_that_no_row_completes(environment, variables, missing, rank):
    """Rank 0 is refused, too: it would train alone, and write the checkpoint of one."""
    ranks = {k for k, v in variables.items() if v == "0" or k.endswith("RANKID")} - {"NODE_RANK"}
    environment(variables | dict.fromkeys(ranks, rank))
    for ask in (process_info, lambda: environment_of_launcher(LightningEnvironment())):
        with pytest.raises(ValueError, match=missing) as raised:
            ask()
        assert ". " not in str(raised.value), "one sentence"
    environment({CHOICE: "none"})
    assert process_info().world_size == 1


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    "launched",
    [OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, HYDRA, PMI, FLUX_RUN, JSRUN, SLURM],
    ids="openmpi hydra pmi flux jsrun slurm".split(),
)
def test_an_outer_script_that_contradicts_the_launcher(environment, launched, rank):
    """RANK and WORLD_SIZE were exported once, so all processes would be rank 0 of 1."""
    ranks = ("RANK", "TASK_RANK", "PROCID", "PMI_RANK")
    environment({k: rank if k.endswith(ranks) else v for k, v in launched.items()})
    environment(OUTER)
    with pytest.raises(ValueError, match="the variable RANK is 0 and WORLD_SIZE is 1, but") as text:
        process_info()
    assert f"says that this is rank {rank}" in str(text.value)
    assert ". " not in str(text.value)
    environment({CHOICE: "environment"})
    assert process_info().launcher == "environment"


@pytest.mark.parametrize("size", ["1", "3", "8"])
@pytest.mark.parametrize("launched", [OPENMPI, HYDRA, PMI, JSRUN, SLURM],
                         ids="openmpi hydra pmi jsrun slurm".split())  # fmt: skip
def test_a_size_alone_that_contradicts_the_launcher(environment, launched, size):
    environment(launched | {"MASTER_ADDR": "host", "WORLD_SIZE": size})
    with pytest.raises(ValueError, match=f"the variable WORLD_SIZE is {size}, but .* unset WORLD"):
        process_info()
    environment({"WORLD_SIZE": str(launcher_size(launched))})
    assert process_info().world_size == launcher_size(launched)


def launcher_size(launched):
    names = {row.world_size for row in LAUNCHERS} & {*launched}
    return int(launched[names.pop()])


def test_a_rank_alone_that_contradicts_the_launcher(environment):
    environment(HYDRA | {"RANK": "0"})
    with pytest.raises(ValueError, match="RANK is 0, but hydra's mpirun says that this is rank 1"):
        process_info()
    environment({"RANK": "1"})
    assert process_info().launcher == "hydra"


def test_pals_with_the_size_of_an_outer_script(environment, nodes):
    environment(PALS | nodes | {"PALS_RANKID": "0", "PMIX_RANK": "0", "WORLD_SIZE": "1"})
    with pytest.raises(ValueError, match="WORLD_SIZE is 1, but PALS' mpiexec has 2 processes on"):
        process_info()


def test_several_processes_for_each_of_the_launcher(environment):
    """srun starts one task on each node, which starts two ranks."""
    environment(SLURM | OUTER | {"RANK": "11", "WORLD_SIZE": "14"})
    assert (process_info().launcher, process_info().rank) == ("environment", 11)


def test_processes_of_a_trainer_within_a_launcher_of_one(environment):
    """`mpirun -n 1 python train.py`, where the Trainer starts the others."""
    one = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1",
           "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}  # fmt: skip
    environment(one | {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"})
    assert (process_info().launcher, process_info().rank) == ("lightning", 1)


@pytest.mark.usefixtures("_no_mpi4py")
def test_flux_with_nodes_of_different_size(environment):
    environment(FLUX_RUN | {"FLUX_JOB_SIZE": "7"})
    with pytest.raises(ValueError, match="7 processes on 2 nodes, and does not tell how many"):
        process_info()
    environment({"LOCAL_WORLD_SIZE": "4"})
    assert process_info().local_world_size == 4


def test_the_trainer_takes_the_launcher(environment, nodes):
    environment(PALS | nodes)
    found = environment_of_launcher(LightningEnvironment())
    assert isinstance(found, LauncherEnvironment)
    assert (found.global_rank(), found.world_size(), found.node_rank()) == (3, 4, 1)
    assert (found.main_address, found.main_port) == ("x1001", process_info().port)


@pytest.mark.parametrize("kind", [MPIEnvironment, LSFEnvironment])
def test_an_environment_of_lightning_that_contradicts_the_launcher(environment, kind):
    environment(JSRUN)
    by_lightning = object.__new__(kind)
    by_lightning.global_rank, by_lightning.world_size = (lambda: 3), (lambda: 4)
    assert environment_of_launcher(by_lightning) is by_lightning
    by_lightning.global_rank = lambda: 0
    with pytest.raises(ValueError, match=f"{kind.__name__} says that this is rank 0 of 4, but"):
        environment_of_launcher(by_lightning)
    for name in JSRUN:  # MPI alone knows it
        del os.environ[name]
    assert environment_of_launcher(by_lightning) is by_lightning


RANKS = {"RANK", *(row.rank for row in LAUNCHERS if row.name != "lightning"), "NEW_RANKID",
         "NEW_TASK_RANK", "HOROVOD_RANK"} - {""}  # fmt: skip
ON_NODE = {row.local_rank for row in LAUNCHERS} | {"HOROVOD_LOCAL_RANK"} - {""}
ON_NODE |= {"OMPI_COMM_WORLD_NODE_RANK"}
NODES = {name for row in LAUNCHERS for name in row.node}
WORLDS = {name for row in LAUNCHERS for name in (row.world_size, *row.sizes)} - {""}
OTHERS = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "MASTER_ADDR": "host", "MASTER_PORT": "2000"}
KNOWN = sorted(
    {name for row in LAUNCHERS for name in row.variables()} | RANKS | ON_NODE | {*OTHERS}
)


def of_two(name, rank, nodes):
    """Return what a launcher of two processes, on one node or on two, sets `name` to."""
    if name in RANKS | NODES | ON_NODE:
        on_node, node = (rank, 0) if nodes == 1 else (0, rank)
        return str(rank if name in RANKS else on_node if name in ON_NODE else node)
    if name == "SLURM_STEP_TASKS_PER_NODE":
        return "2" if nodes == 1 else "1(x2)"
    if "NNODES" in name:
        return str(nodes)
    if "LOCAL" in name:
        return str(2 // nodes)
    return "2" if name in WORLDS else OTHERS.get(name, "none")


def attempt(function):
    """Return what the function returns, or the ValueError that it raises."""
    try:
        return function()
    except ValueError as error:
        return error


@pytest.mark.slow
@pytest.mark.usefixtures("_no_mpi4py")
@settings(max_examples=1000, deadline=None)
@given(st.sets(st.sampled_from(KNOWN), max_size=6), st.integers(0, 1), st.integers(1, 2))
def test_no_set_of_variables_leaves_a_rank_alone(names, rank, nodes):
    """Any part of what launchers of two processes set gives the rank, or one sentence."""
    env = {name: of_two(name, rank, nodes) for name in names}
    with mock.patch("os.environ", env):
        found = attempt(process_info)
    if isinstance(found, ValueError):
        assert ". " not in str(found), "one sentence"
        return
    if found.launcher == "lightning" and "LOCAL_RANK" not in env:  # it will start the second
        rank = 0
    if found.world_size == 2:
        assert found.rank == rank
        return
    signs = {name for name in names if name in RANKS | ON_NODE | NODES | WORLDS or "LOCAL" in name}
    script = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"}  # 0 in the script of a job
    if signs & script:
        assert "SLURM_JOB_ID" in names
        assert {env[name] for name in signs & script} == {"0"}
    assert signs - script <= {"NODE_RANK"} | ({"LOCAL_RANK"} if "NODE_RANK" in names else set())
