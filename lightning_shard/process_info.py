"""Which of how many processes this is, and where they meet, as the launcher says in variables.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html (torchrun),
https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html (Open MPI),
https://slurm.schedmd.com/srun.html (SLURM); the variables of hydra, which Intel MPI and MPICH
share, are those that it was seen to set.
"""

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

PORTS = range(20000, 32768)  # below those that Linux hands out to any program
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "PMIX_NAMESPACE")


@dataclass(frozen=True)
class ProcessInfo:
    """This process among those of its run.

    Attributes:
        launcher: "torchrun", "openmpi", "hydra" (Intel MPI, MPICH), "slurm", "lightning" (the
            Trainer's own processes), "notebook" (of `launch`, or of a Trainer in a notebook),
            "environment" (torch's variables, set by something else), or "none": one process.
        rank: From 0 to `world_size` - 1.
        local_rank: Among the processes of this node, which is also the index of its device.
        world_size: Number of processes.
        local_world_size: Number of processes on this node.
        node: Index of this node. Open MPI and hydra do not tell it; there it is the one of ranks
            that fill one node after the other.
        address: Where rank 0 holds the store in which the processes meet.
        port: Of the store; of MASTER_PORT, or else of the job's number, so that it is the same on
            all ranks.
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: int = 0
    address: str = "127.0.0.1"
    port: int = 0


def process_info() -> ProcessInfo:
    """Find what the launcher of this process says; it needs no mpi4py, and starts nothing.

    Raises:
        ValueError: The variables contradict each other, or MASTER_ADDR is missing where the
            launcher does not tell the address of rank 0.
    """
    for marker, read in _LAUNCHERS.items():
        if all(name in os.environ for name in marker.split()):
            info = read(os.environ)
            break
    else:
        info = ProcessInfo("none", port=_port())
    if not 0 <= info.rank < info.world_size or not 0 <= info.local_rank < info.local_world_size:
        raise ValueError(
            f"the variables of {info.launcher} say rank {info.rank} of {info.world_size} and local "
            f"rank {info.local_rank} of {info.local_world_size}; a rank is at least 0 and below "
            "the number of processes."
        )
    return info


def _of_torchrun(env: Mapping[str, str]) -> ProcessInfo:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    elastic = env.get("TORCHELASTIC_RUN_ID")
    launcher = "environment" if elastic is None else "torchrun"
    launcher = "notebook" if elastic == NOTEBOOK else launcher
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if world > 1 and not env.get(name) and not dist.is_initialized():
            raise ValueError(
                f"RANK is {rank} and WORLD_SIZE {world}, but {name} is not set; set it to the "
                f"{'host' if name == 'MASTER_ADDR' else 'port'} of rank 0 on every rank, or start "
                "the processes by torchrun."
            )
    local = _number(env, "LOCAL_WORLD_SIZE", world)
    node = _number(env, "GROUP_RANK", _number(env, "NODE_RANK", rank // local))
    local_rank = _number(env, "LOCAL_RANK", rank % local)
    address = env.get("MASTER_ADDR", "127.0.0.1")
    return ProcessInfo(launcher, rank, local_rank, world, local, node, address, _port())


def _of_mpi(launcher: str, *names: str) -> Callable[[Mapping[str, str]], ProcessInfo]:
    def read(env: Mapping[str, str]) -> ProcessInfo:
        rank, world, local_rank, local = (_number(env, name) for name in names)
        address = env.get("MASTER_ADDR") or ("127.0.0.1" if local == world else _first_host(env))
        if not address:
            flag = "-x" if launcher == "openmpi" else "-genv"
            raise ValueError(
                f"{launcher} started {world} processes, {local} of them on this node, and does not "
                f"tell the others where rank 0 is; set MASTER_ADDR: mpirun {flag} "
                f"MASTER_ADDR{'=' if flag == '-x' else ' '}<host of rank 0> ..."
            )
        return ProcessInfo(
            launcher, rank, local_rank, world, local, rank // local, address, _port()
        )

    return read


def _of_slurm(env: Mapping[str, str]) -> ProcessInfo:
    node = _number(env, "SLURM_NODEID")
    tasks = [  # 2(x3),1: of each node
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"])
        for _ in range(int(times or 1))
    ]
    world = _number(env, "SLURM_STEP_NUM_TASKS")
    return ProcessInfo(
        "slurm",
        _number(env, "SLURM_PROCID"),
        _number(env, "SLURM_LOCALID"),
        world,
        tasks[node],
        node,
        env.get("MASTER_ADDR") or _first_host(env) or "127.0.0.1",
        _port(),
    )


def _of_lightning(env: Mapping[str, str]) -> ProcessInfo:
    """Lightning says node and local rank, and when a stage ends no longer the number of processes.

    The rank on another node than the first is known once the processes have met.
    """
    local_rank, node = _number(env, "LOCAL_RANK"), _number(env, "NODE_RANK")
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        local = (rank - local_rank) // node if node else world
    elif node:
        raise ValueError(
            f"NODE_RANK is {node} and RANK is not set, so the rank of this process is known once "
            "its process group runs; ask after the Trainer has begun, or start it by torchrun."
        )
    else:
        rank, world = local_rank, _number(env, "WORLD_SIZE", local_rank + 1)
        local = world
    address = env.get("MASTER_ADDR", "127.0.0.1")
    return ProcessInfo("lightning", rank, local_rank, world, local, node, address, _port())


def _first_host(env: Mapping[str, str]) -> str:
    """The first of SLURM's `n[1-3,5],m7`, `n7`, `n[08-10]`; "" outside of a job."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", nodes).split(",")[0]


def _port() -> int:
    if os.environ.get("MASTER_PORT"):
        return _number(os.environ, "MASTER_PORT")
    step = os.environ.get("SLURM_STEP_ID", "")
    job = next((os.environ[name] + step for name in _JOB_IDS if name in os.environ), None)
    if job is None:  # of the same parent on one node, as under hydra
        job = f"{os.getuid()} {os.getppid()}"
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdigit():
        raise ValueError(f"the variable {name} must be a number of 0 or more; got {value!r}.")
    return int(value)


NOTEBOOK = "lightning_shard.launch"  # TORCHELASTIC_RUN_ID of ranks that a notebook starts

# The variables that only this launcher sets: a launcher that runs inside another comes first.
_LAUNCHERS: dict[str, Callable[[Mapping[str, str]], ProcessInfo]] = {
    "RANK WORLD_SIZE": _of_torchrun,
    "OMPI_COMM_WORLD_RANK": _of_mpi(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "PMI_RANK MPI_LOCALRANKID": _of_mpi(
        "hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    ),
    "LOCAL_RANK NODE_RANK": _of_lightning,
    "SLURM_PROCID SLURM_STEP_NUM_TASKS": _of_slurm,
}
