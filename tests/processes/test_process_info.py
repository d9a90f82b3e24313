"""Ranks, addresses and ports from the variables that launchers set."""

import os
import socket
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_shard import ProcessInfo, process_info, start_process_group
from lightning_shard.cli.positions import check_variables
from lightning_shard.cli.usage import is_first_rank
from lightning_shard.processes.forking import belongs_to_a_group
from lightning_shard.processes.mesh import own_node
from lightning_shard.processes.process_info import CHOICE, LAUNCHERS, NOTEBOOK
from lightning_shard.processes.variables import PORTS, Launcher, read_numbers
from lightning_shard.trainer.environment import (
    LauncherEnvironment,
    check_processes,
    environment_of_launcher,
)

JOB = {"PMIX_NAMESPACE": "224067585"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "n[08-10],m1", "SLURM_STEP_ID": "0",
}  # fmt: skip
TORCH = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
TORCHRUN = TORCH | {
    "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
}  # fmt: skip
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
PALS = {  # as they were seen on Aurora, without a number of processes
    "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "1",
    "PALS_DEPTH": "1", "PALS_APID": "5f2", "PMIX_RANK": "3", "PMIX_NAMESPACE": "job",
}  # fmt: skip
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
CRAY = PMI | {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
FLUX_RUN = {
    "FLUX_TASK_RANK": "5", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2Vz", "PMI_RANK": "5", "PMI_SIZE": "8", "MASTER_ADDR": "host",
}  # fmt: skip
JSRUN = {
    "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2", "LSB_JOBID": "7", "PMIX_RANK": "3", "MASTER_ADDR": "host",
}  # fmt: skip
LIGHTNING = {
    "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000",
}  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    """Sets variables, where no launcher's are."""
    for name in list(os.environ):
        launchers = ("OMPI", "PMI", "MPI_LOCAL", "SLURM", "MASTER", "TORCHELASTIC", "PALS", "PBS",
                     "FLUX", "JSM", "LSB", "ALPS", "MV2")  # fmt: skip
        if name.startswith(launchers) or "RANK" in name or "WORLD_SIZE" in name:
            monkeypatch.delenv(name)

    def put(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, ProcessInfo("torchrun", 5, 1, 8, 4, 1, "host", 29500)),
        (TORCH, ProcessInfo("environment", 5, 5, 8, 8, 0, "host", 29500)),
        (LIGHTNING, ProcessInfo("lightning", 1, 1, 2, 2, 0, "127.0.0.1", 4000)),
        (OPENMPI | {"MASTER_ADDR": "host"}, ProcessInfo("openmpi", 3, 1, 4, 2, 1, "host", -1)),
        (HYDRA, ProcessInfo("hydra", 1, 1, 2, 2, 0, "127.0.0.1", -1)),
        (SLURM, ProcessInfo("slurm", 5, 1, 7, 2, 2, "n08", -1)),
        (MVAPICH | {"MASTER_ADDR": "host"}, ProcessInfo("mvapich", 3, 1, 4, 2, 1, "host", -1)),
        (PALS | {"PMIX_SIZE": "2", "PALS_RANKID": "1", "PMIX_RANK": "1", "PALS_NODEID": "0"},
         ProcessInfo("pals", 1, 1, 2, 2, 0, "127.0.0.1", -1)),
        (PALS | {"PMI_SIZE": "4", "MASTER_ADDR": "host"},
         ProcessInfo("pals", 3, 1, 4, 2, 1, "host", -1)),
        (PALS | {"WORLD_SIZE": "4", "MASTER_ADDR": "host"},
         ProcessInfo("pals", 3, 1, 4, 2, 1, "host", -1)),
        (FLUX_RUN, ProcessInfo("flux", 5, 1, 8, 4, 1, "host", -1)),
        (JSRUN, ProcessInfo("jsrun", 3, 1, 4, 2, 1, "host", -1)),
        (PMI, ProcessInfo("pmi", 1, 1, 2, 2, 0, "127.0.0.1", -1)),
        (CRAY, ProcessInfo("pmi", 1, 1, 2, 2, 0, "127.0.0.1", -1)),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"},
         ProcessInfo("slurm", 5, 1, 7, 2, 2, "n08", -1)),
        (SLURM | {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "2"},
         ProcessInfo("slurm", 5, 1, 7, 2, 2, "n08", -1)),
        ({"ALPS_APP_PE": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host"},
         ProcessInfo("alps", 3, 1, 4, 2, 1, "host", -1)),
        ({"PMIX_RANK": "1", "PMIX_SIZE": "2"}, ProcessInfo("pmix", 1, 1, 2, 2, 0, "127.0.0.1", -1)),
        (SLURM | OPENMPI, ProcessInfo("openmpi", 3, 1, 4, 2, 1, "n08", -1)),
        (SLURM | TORCHRUN, ProcessInfo("torchrun", 5, 1, 8, 4, 1, "host", 29500)),
        ({}, ProcessInfo("none", 0, 0, 1, 1, 0, "127.0.0.1", -1)),
    ],
    ids="torchrun torch lightning openmpi hydra slurm mvapich pals pals-pmi pals-size flux jsrun "
    "pmi cray srun-pmi srun-cray aprun pmix mpi-in-slurm run-in-slurm none".split(),
)  # fmt: skip
def test_launchers(environment, variables, expected):
    environment(JOB | variables)
    found = process_info()
    if expected.port == -1:
        assert found.port in PORTS
        found = replace(found, port=-1)
    assert found == expected


def test_port_is_that_of_the_job(environment):
    environment(OPENMPI | {"MASTER_ADDR": "host"} | JOB)
    ports = set()
    for rank in "0123":
        environment(
            {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": str(int(rank) % 2)}
        )
        ports.add(process_info().port)
    assert len(ports) == 1
    environment({"PMIX_NAMESPACE": "another"})
    assert process_info().port not in ports
    environment({"MASTER_PORT": "1234"})
    assert process_info().port == 1234


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE 2, but MASTER_ADDR is not set; set it to"),
        ({**TORCH, "MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({**TORCH, "RANK": "8"}, "RANK is 8, but WORLD_SIZE is 8: that is rank 8 of 8"),
        ({**TORCH, "RANK": "one"}, "RANK must be a whole number from 0 to 1000000; got 'one'"),
        (OPENMPI, "MASTER_ADDR=<host of rank 0>"),
        ({**LIGHTNING, "NODE_RANK": "1"}, "once its process group runs"),
    ],
    ids="address port rank number mpi lightning".split(),
)
def test_variables_that_do_not_suffice(environment, variables, message):
    environment(JOB | variables)
    with pytest.raises(ValueError, match=message):
        start_process_group("cpu")


SETS = {
    "torchrun": TORCHRUN, "environment": TORCH, "lightning": LIGHTNING, "slurm": SLURM,
    "openmpi": OPENMPI | {"MASTER_ADDR": "host"}, "hydra": HYDRA,
}  # fmt: skip
READ = {  # the variables that this package reads of each launcher
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"],
    "environment": ["RANK", "WORLD_SIZE"],
    "lightning": ["LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"],
    "slurm": ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS",
              "SLURM_STEP_TASKS_PER_NODE"],
    "openmpi": list(OPENMPI), "hydra": list(HYDRA),
}  # fmt: skip
WRONG = {
    "left out": None, "0": "0", "-1": "-1", "empty": "", "text": "two", "fraction": "1.5",
    "large": "9" * 10, "digits of others": "\u00b2",
}  # fmt: skip
# no rank 0, or node 0, is wrong by itself; what may be left out is told by the others
RIGHT = {
    ("torchrun", "GROUP_RANK", "left out"), ("torchrun", "LOCAL_RANK", "left out"),
    ("torchrun", "GROUP_RANK", "0"), ("torchrun", "LOCAL_RANK", "0"), ("torchrun", "RANK", "0"),
    ("torchrun", "LOCAL_WORLD_SIZE", "left out"),
    ("environment", "RANK", "0"), ("lightning", "LOCAL_RANK", "0"), ("lightning", "NODE_RANK", "0"),
    ("lightning", "LOCAL_RANK", "left out"), ("lightning", "WORLD_SIZE", "left out"),
    ("slurm", "SLURM_PROCID", "0"), ("slurm", "SLURM_LOCALID", "0"), ("slurm", "SLURM_NODEID", "0"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "0"), ("openmpi", "OMPI_COMM_WORLD_LOCAL_RANK", "0"),
    ("hydra", "PMI_RANK", "0"), ("hydra", "MPI_LOCALRANKID", "0"),
}  # fmt: skip
HALF_SET = [
    (kind, name, wrong)
    for kind, names in READ.items()
    for name in names
    for wrong in WRONG
    if (kind, name, wrong) not in RIGHT
]


@pytest.mark.parametrize(("kind", "name", "wrong"), HALF_SET)
def test_a_variable_that_is_wrong_is_named(environment, monkeypatch, kind, name, wrong):
    environment(SETS[kind])
    monkeypatch.delenv(name)
    if WRONG[wrong] is not None:
        monkeypatch.setenv(name, WRONG[wrong])
    if (kind, name, wrong) == ("lightning", "NODE_RANK", "left out"):
        name = "RANK"  # what is left are variables of torch
    with pytest.raises(ValueError, match=rf"\b{name}\b") as raised:
        process_info()
    assert ". " not in str(raised.value), "one sentence"


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("port", ["0", "-1", "99999", "http", "1.5"])
def test_a_port_that_is_none(environment, kind, port):
    environment(SETS[kind] | {"MASTER_PORT": port})
    with pytest.raises(ValueError, match="MASTER_PORT must be a whole number from 1 to 65535"):
        process_info()


@pytest.mark.parametrize(("kind", "name", "wrong"), sorted(RIGHT))
def test_a_variable_that_is_not_needed(environment, monkeypatch, kind, name, wrong):
    environment(SETS[kind])
    monkeypatch.delenv(name)
    if WRONG[wrong] is not None:
        monkeypatch.setenv(name, WRONG[wrong])
    found = process_info()
    assert found.launcher == kind
    assert found.rank < found.world_size


@pytest.mark.parametrize(
    ("name", "value", "missing"),
    [
        ("WORLD_SIZE", "2", "RANK"), ("RANK", "0", "WORLD_SIZE"), ("LOCAL_RANK", "1", "WORLD_SIZE"),
        ("PMI_RANK", "0", "MPI_LOCALRANKID"), ("OMPI_COMM_WORLD_SIZE", "2", "OMPI_COMM_WORLD_RANK"),
        ("SLURM_PROCID", "0", "SLURM_STEP_NUM_TASKS"), ("TORCHELASTIC_RUN_ID", "none", None),
        ("WORLD_SIZE", "1", None), ("NODE_RANK", "0", None), ("MASTER_ADDR", "host", None),
    ],
)  # fmt: skip
def test_one_variable_alone(environment, name, value, missing):
    environment({name: value})
    if missing is None:
        assert process_info().world_size == 1
        return
    with pytest.raises(ValueError, match=f"the variable {name} is '{value}', but .*{missing}"):
        process_info()


def test_script_of_a_slurm_job_is_one_process(environment):
    environment({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert process_info().launcher == "none"


@pytest.mark.parametrize("tasks", ["7", "9"])
def test_a_step_of_fewer_tasks_than_its_job(environment, tasks):
    """`srun --ntasks 7` in a job of 9 tasks, where SLURM_NTASKS may still be the job's."""
    ports = []
    for step in "01":
        environment(SLURM | {
            "SLURM_NTASKS": tasks, "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_ID": step,
        })  # fmt: skip
        found = environment_of_launcher(SLURMEnvironment(auto_requeue=False))
        assert isinstance(found, SLURMEnvironment), "which Lightning queues again"
        assert not found.auto_requeue
        assert (found.global_rank(), found.world_size()) == (5, 7)
        assert (found.local_rank(), found.node_rank(), found.main_address) == (1, 2, "n08")
        ports.append(found.main_port)
    assert ports[0] != ports[1], "two steps of a job meet apart"


@pytest.mark.parametrize(
    ("chosen", "variables", "expected"),
    [
        ("slurm", SLURM | TORCHRUN, ("slurm", 5, 7)),
        ("openmpi", OPENMPI | TORCHRUN, ("openmpi", 3, 4)),
        ("torchrun", OPENMPI | TORCHRUN, ("torchrun", 5, 8)),
        ("none", SLURM | OPENMPI, ("none", 0, 1)),
        ("none", SLURM | LIGHTNING, ("lightning", 1, 2)),  # a Trainer started this one
        ("slurm", SLURM | TORCHRUN | {"TORCHELASTIC_RUN_ID": NOTEBOOK}, ("notebook", 5, 8)),
        ("", SLURM | TORCHRUN, ("torchrun", 5, 8)),
    ],
)
def test_the_launcher_is_chosen(environment, chosen, variables, expected):
    environment(JOB | {"MASTER_ADDR": "host"} | variables | {CHOICE: chosen})
    found = process_info()
    assert (found.launcher, found.rank, found.world_size) == expected
    assert found.distributed == (found.world_size > 1)
    assert is_first_rank() == (found.rank == 0)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("slrum", "LAUNCHER must be one of torchrun, environment, openmpi, .*slurm, .* and none"),
        ("openmpi", "'openmpi', but OMPI_COMM_WORLD_RANK, which Open MPI sets, is not set; start"),
    ],
)
def test_a_choice_that_is_not_there(environment, chosen, message):
    environment(SLURM | TORCHRUN | {CHOICE: chosen})
    with pytest.raises(ValueError, match=message) as caught:
        process_info()
    assert ". " not in str(caught.value), "one sentence"


def test_the_trainer_follows_the_choice(environment):
    """Also where Lightning has found another launcher's variables."""
    environment(SLURM | TORCHRUN | {CHOICE: "slurm", "SLURM_NTASKS_PER_NODE": "2"})
    slurm, torchrun = SLURMEnvironment(), TorchElasticEnvironment()
    assert environment_of_launcher(slurm).world_size() == 7
    found = environment_of_launcher(torchrun)
    assert isinstance(found, LauncherEnvironment)
    assert (found.global_rank(), found.world_size()) == (5, 7)
    environment({CHOICE: "torchrun"})
    assert environment_of_launcher(torchrun) is torchrun
    assert environment_of_launcher(slurm).global_rank() == 5
    environment({CHOICE: "none", "NODE_RANK": "0"})
    assert type(environment_of_launcher(slurm)) is LightningEnvironment
    assert check_variables(["fit"], []) is None


def test_device_of_a_process(environment):
    environment(TORCHRUN)
    assert process_info().device == torch.device("cpu")
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=4) as count,
    ):
        assert process_info().device == torch.device("cuda", 1)
        count.return_value = 1  # a launcher may show each process its own only
        assert process_info().device == torch.device("cuda", 0)
        count.return_value = 0
        with pytest.raises(RuntimeError, match="no device of type 'cuda' for its 4 processes"):
            _ = process_info().device


@pytest.mark.spmd(2)
def test_device_where_a_group_of_the_cpu_runs():
    with mock.patch("torch.cuda.is_available", return_value=True):
        assert process_info().device == torch.device("cpu")


TABLE = "lightning_shard.processes.process_info.LAUNCHERS"
STARTER = Launcher(  # that there is not
    "starter", "starter run", read_numbers,
    rank="STARTER_RANK", world_size="STARTER_SIZE", local_rank="STARTER_LOCAL_ID",
    local_world_size="STARTER_LOCAL_SIZE", needed=("STARTER_RANK", "STARTER_SIZE"),
    address_option="starter run --env MASTER_ADDR=<host of rank 0> ...", tells_nodes=True,
)  # fmt: skip


def test_a_row_is_all_that_a_new_launcher_needs(environment, monkeypatch):
    monkeypatch.setattr(TABLE, (STARTER, *LAUNCHERS))
    environment({"STARTER_RANK": "3", "STARTER_SIZE": "4"})
    assert process_info().launcher == "starter"
    assert own_node() == f"{socket.gethostname()}/0"
    assert belongs_to_a_group()
    assert not is_first_rank()
    found = environment_of_launcher(LightningEnvironment())
    assert isinstance(found, LauncherEnvironment)
    assert (found.global_rank(), found.world_size(), found.main_port) == (3, 4, process_info().port)
    with pytest.raises(ValueError, match=r"starter run started 4 processes, but Trainer\(devices"):
        check_processes(found, 2, 1)
    with pytest.raises(ValueError, match=r"Fabric\(devices=2, .* use Fabric\(devices=4, num_nodes"):
        check_processes(found, 2, 1, "Fabric")


@pytest.mark.parametrize(
    ("ranks", "local", "advice"),
    [(8, 4, "devices=4, num_nodes=2"), (2, 1, "devices=1, num_nodes=2"), (5, 3, "devices=5")],
)
def test_a_forgotten_number_of_nodes_is_advised(environment, ranks, local, advice):
    """Not more devices than a node has; where nodes differ only the product is right."""
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0}
    numbers |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": local}
    environment(torchrun | {name: str(value) for name, value in numbers.items()})
    with pytest.raises(ValueError, match=rf"use Trainer\({advice}"):
        check_processes(TorchElasticEnvironment(), local, 1)


@pytest.mark.spmd(2)
def test_address_is_not_needed_once_the_processes_have_met():
    with mock.patch.dict(os.environ):
        del os.environ["MASTER_ADDR"]
        assert process_info().rank == dist.get_rank()
