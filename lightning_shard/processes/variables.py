"""Reads the variables of launchers, and checks their numbers."""

import atexit
import os
import re
import signal
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Env = Mapping[str, str]
PORTS = range(20000, 32768)  # below those that Linux hands out to any program
MOST = 1_000_000  # processes; a larger number is a mistake
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "PMIX_NAMESPACE")


def launcher_holds_store() -> bool:
    """Return whether torchrun's agent, or `launch`, holds the store in which the ranks meet."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def end_attempts() -> None:
    """When this process ends, let the agent of torchrun that has started it end, too.

    A status that says so does not exist, so the agent gets SIGTERM. Each agent has a first local
    rank, which sends it.
    """
    env = os.environ
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and env.get("LOCAL_RANK") == "0" and _is_agent(os.getppid()):
        atexit.register(os.kill, os.getppid(), signal.SIGTERM)


def _is_agent(process: int) -> bool:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(w == b"torch.distributed.run" or w.endswith(b"/torchrun") for w in words)


@dataclass(frozen=True)
class ProcessInfo:
    """Places this process among those of its run.

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

    @property
    def distributed(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1

    @property
    def device(self) -> "torch.device":
        """The device of this process.

        Of the type that the process group carries or, before there is one, of the first type that
        this machine has: CUDA, XPU, CPU. Its index is `local_rank`, or 0 where the launcher shows
        each process one device only.

        Raises:
            RuntimeError: The machine has fewer devices than processes.
        """
        from lightning_shard.processes.device import own_device  # loads torch

        return own_device(None, self.local_rank, self.local_world_size)


@dataclass(frozen=True)
class Launcher:
    """Describes a launcher by the variables that it sets.

    Attributes:
        name: As `ProcessInfo.launcher` has it.
        title: As sentences call it.
        read: Makes the ProcessInfo of its variables.
        needed: The variables without which it is another launcher, or a mistake.
        rank: The variable of the rank.
        world_size: The variable of the number of processes.
        local_rank: The variable of the rank on its node.
        local_world_size: The variable of the number of processes on this node.
        node: The variables of the node's index, of which the first that is set counts.
        says_alone: Whether some of its variables are there although it has not started this
            process, as those of SLURM are in the script of a job.
        marker: "NAME" or "NAME=value", which must be there too.
        needs_address: Whether MASTER_ADDR and MASTER_PORT belong to its variables.
        command: The program that starts processes with it.
        address_option: The option by which its command sets MASTER_ADDR on all nodes.
        known_to_lightning: Whether Lightning has an environment of its own for it.
        starts_all: Whether it, and not the Trainer, starts the processes.
        tells_nodes: Whether `ProcessInfo.node` tells the nodes apart where host names do not, as in
            containers on one host.
    """

    name: str
    title: str
    read: "Callable[[Launcher, Env], ProcessInfo]"
    needed: tuple[str, ...] = ()
    rank: str = ""
    world_size: str = ""
    local_rank: str = ""
    local_world_size: str = ""
    node: tuple[str, ...] = ()
    says_alone: Callable[[Env], bool] = lambda _: False
    marker: str = ""
    needs_address: bool = False
    command: str = ""
    address_option: str = ""
    known_to_lightning: bool = False
    starts_all: bool = True
    tells_nodes: bool = False

    def variables(self) -> list[str]:
        """Name all variables by which it is known and read."""
        marker, _, _ = self.marker.partition("=")
        numbers = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        return [name for name in (marker, *numbers, *self.node, *self.needed) if name]

    def marked(self, env: Env) -> bool:
        """Whether the marker is there."""
        name, _, value = self.marker.partition("=")
        return not name or (name in env and value in ("", env[name]))


def read_numbers(row: Launcher, env: Env) -> ProcessInfo:
    """Read numbers that a launcher tells one by one; those of a node may be missing."""
    rank, world = _number(env, row.rank), _number(env, row.world_size, least=1)
    local = _number(env, row.local_world_size, world, least=1)
    local_rank = _number(env, row.local_rank, rank % local)
    node_name = next((name for name in row.node if name in env), "")
    node = _number(env, node_name, rank // local)
    address = env.get("MASTER_ADDR", "")
    if row.needs_address:
        _check_address(row, env, world)
    elif not address and local < world:
        address = _first_host(env)
        if not address:
            raise ValueError(
                f"{row.title} started {world} processes, {local} of them on this node, and does "
                f"not tell the others where rank 0 is; set MASTER_ADDR: {row.address_option}."
            )
    address = address or "127.0.0.1"
    return ProcessInfo(row.name, rank, local_rank, world, local, node, address, _port(env))


def _check_address(row: Launcher, env: Env, world: int) -> None:
    for name, what in (("MASTER_ADDR", "host"), ("MASTER_PORT", "port")):
        if world > 1 and not env.get(name) and joined() is None:
            raise ValueError(
                f"{row.rank} is {env[row.rank]} and {row.world_size} {world}, but {name} is not "
                f"set; set it to the {what} of rank 0 on every rank, or start the processes by "
                "torchrun."
            )


def of_slurm(row: Launcher, env: Env) -> ProcessInfo:
    node = _number(env, row.node[0])
    world, told = _number(env, row.world_size, least=1), env.get(row.local_world_size, "")
    tasks = [  # 2(x3),1: of each node
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", told)
        for _ in range(min(int(times or 1), MOST))
    ]
    if sum(tasks) != world or node >= len(tasks):
        raise ValueError(
            f"{row.local_world_size} is {told!r}, {row.world_size} {world} and {row.node[0]} "
            f"{node}, which contradict each other; start the processes by srun."
        )
    rank, local_rank = _number(env, row.rank), _number(env, row.local_rank)
    address = env.get("MASTER_ADDR") or _first_host(env) or "127.0.0.1"
    return ProcessInfo(row.name, rank, local_rank, world, tasks[node], node, address, _port(env))


def of_lightning(row: Launcher, env: Env) -> ProcessInfo:
    """Lightning says node and local rank, and when a stage ends no longer the number of processes.

    The rank on another node than the first is known once the processes have met.
    """
    local_rank, node = _number(env, "LOCAL_RANK", 0), _number(env, "NODE_RANK")
    if met := joined():
        rank, world = met
        local = (rank - local_rank) // node if node else world
    elif node:
        raise ValueError(
            f"NODE_RANK is {node} and RANK is not set, so the rank of this process is known once "
            "its process group runs; ask after the Trainer has begun, or start it by torchrun."
        )
    else:
        rank, world = local_rank, _number(env, "WORLD_SIZE", local_rank + 1, least=1)
        local = world
    address = env.get("MASTER_ADDR", "127.0.0.1")
    return ProcessInfo(row.name, rank, local_rank, world, local, node, address, _port(env))


def alone(row: Launcher, env: Env) -> ProcessInfo:
    return ProcessInfo(row.name, port=_port(env))


def joined() -> tuple[int, int] | None:
    """Read rank and number of processes of the process group; None where there is none."""
    if "torch" not in sys.modules:  # which the command line loads late
        return None
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def _first_host(env: Env) -> str:
    """The first of SLURM's `n[1-3,5],m7`, `n7`, `n[08-10]`; "" outside of a job."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", nodes).split(",")[0]


def _port(env: Env) -> int:
    if env.get("MASTER_PORT"):
        return _number(env, "MASTER_PORT", least=1, most=65535)
    step = env.get("SLURM_STEP_ID", "")
    job = next((env[name] + step for name in _JOB_IDS if name in env), None)
    if job is None:  # of the same parent on one node, as under hydra
        job = f"{os.getuid()} {os.getppid()}"
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def _number(
    env: Env, name: str, default: int | None = None, *, least: int = 0, most: int = MOST
) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    if value is None or not re.fullmatch("[0-9]{1,12}", value) or not least <= int(value) <= most:
        raise ValueError(
            f"the variable {name} must be a whole number from {least} to {most}; got "
            f"{'nothing' if value is None else repr(value)}."
        )
    return int(value)
