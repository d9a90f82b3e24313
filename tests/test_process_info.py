"""Ranks, addresses and ports from the variables that launchers set."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_shard import ProcessInfo, process_info, start_process_group
from lightning_shard.process_info import PORTS

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
LIGHTNING = {
    "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000",
}  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    """Sets variables, where no launcher's are."""
    for name in list(os.environ):
        if name.startswith(("OMPI", "PMI", "SLURM", "MASTER", "TORCHELASTIC")) or "RANK" in name:
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
        (SLURM | OPENMPI, ProcessInfo("openmpi", 3, 1, 4, 2, 1, "n08", -1)),
        (SLURM | TORCHRUN, ProcessInfo("torchrun", 5, 1, 8, 4, 1, "host", 29500)),
        ({}, ProcessInfo("none", 0, 0, 1, 1, 0, "127.0.0.1", -1)),
    ],
    ids="torchrun torch lightning openmpi hydra slurm mpi-in-slurm run-in-slurm none".split(),
)
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
        ({**TORCH, "RANK": "8"}, "rank 8 of 8"),
        ({**TORCH, "RANK": "one"}, "RANK must be a number of 0 or more; got 'one'"),
        (OPENMPI, "MASTER_ADDR=<host of rank 0>"),
        ({**LIGHTNING, "NODE_RANK": "1"}, "once its process group runs"),
    ],
    ids="address port rank number mpi lightning".split(),
)
def test_variables_that_do_not_suffice(environment, variables, message):
    environment(JOB | variables)
    with pytest.raises(ValueError, match=message):
        start_process_group("cpu")


@pytest.mark.spmd(2)
def test_address_is_not_needed_once_the_processes_have_met():
    with mock.patch.dict(os.environ):
        del os.environ["MASTER_ADDR"]
        assert process_info().rank == dist.get_rank()
