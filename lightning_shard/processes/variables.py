"""Readers of the variables of launchers, which check their numbers.

A launcher that leaves out the number of processes is completed from what else knows it: the file of
the job's hosts, or mpi4py. A number is never guessed, since each process would then train alone.
"""

import importlib
import importlib.util
import os
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Env = Mapping[str, str]
PORTS = range(20000, 32768)  # below those that Linux hands out to any program
MOST = 1_000_000  # processes; a larger number is a mistake
_JOB_IDS = ("FLUX_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "PMIX_NAMESPACE")
_STEP_IDS = ("SLURM_STEP_ID", "PALS_APID")  # a job may start the processes of several runs


def launcher_holds_store() -> bool:
    """Return whether torchrun's agent, or `launch`, holds the store in which the ranks meet."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@dataclass(frozen=True)
class ProcessInfo:
    """Places this process among those of its run.

    Attributes:
        launcher: The name of a row of `process_info.LAUNCHERS`, such as "torchrun", "slurm" and
            "pals", "lightning" (the Trainer's own processes), "notebook" (of `launch`, or of a
            Trainer in a notebook), "environment" (torch's variables, set by something else), or
            "none": one process.
        rank: The rank of this process, from 0 to `world_size` - 1.
        local_rank: The rank among the processes of this node, which is also the index of the
            device, unless each process sees one device only.
        world_size: Number of processes.
        local_world_size: Number of processes on this node.
        node: Index of this node. MPI's launchers do not tell it; there it is the one of ranks that
            fill one node after the other.
        address: The host at which rank 0 holds the store in which the processes meet.
        port: The port of the store: MASTER_PORT, or else one that follows from the job's number, so
            that it is the same on all ranks.
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
        """True if there are other processes."""
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
        name: The value of `ProcessInfo.launcher`.
        title: The launcher's name in sentences.
        read: Makes the ProcessInfo of its variables.
        needed: The variables without which it is another launcher, or a mistake.
        rank: The variable of the rank.
        world_size: The variable of the number of processes.
        sizes: Other variables of that number, of which the first that is set counts.
        local_rank: The variable of the rank on its node.
        local_world_size: The variable of the number of processes on this node.
        node: The variables of the node's index, of which the first that is set counts.
        nodes: The variable of the number of nodes.
        says_alone: Returns whether some of its variables are there although it has not started this
            process, as those of SLURM are in the script of a job.
        applies: Returns whether its variables are its own, and not also set by another launcher.
        marker: "NAME" or "NAME=value", which must be there too.
        needs_address: True if MASTER_ADDR and MASTER_PORT belong to its variables.
        command: The program that starts processes with it.
        address_option: The option by which its command sets MASTER_ADDR on all nodes.
        known_to_lightning: True if Lightning has an environment of its own for it.
        starts_all: True if it, and not the Trainer, starts the processes.
        tells_nodes: True if `ProcessInfo.node` tells the nodes apart where host names do not, as in
            containers on one host.
        source: The page that documents the variables, or how they were seen.
    """

    name: str
    title: str
    read: "Callable[[Launcher, Env], ProcessInfo]"
    needed: tuple[str, ...] = ()
    rank: str = ""
    world_size: str = ""
    sizes: tuple[str, ...] = ()
    local_rank: str = ""
    local_world_size: str = ""
    node: tuple[str, ...] = ()
    nodes: str = ""
    says_alone: Callable[[Env], bool] = lambda _: False
    applies: Callable[[Env], bool] = lambda _: True
    marker: str = ""
    needs_address: bool = False
    command: str = ""
    address_option: str = ""
    known_to_lightning: bool = False
    starts_all: bool = True
    tells_nodes: bool = False
    source: str = ""

    def variables(self) -> list[str]:
        """Name all variables by which it is known and read."""
        marker, _, _ = self.marker.partition("=")
        numbers = (self.rank, self.world_size, *self.sizes, self.local_rank, self.local_world_size)
        names = (marker, *numbers, *self.node, self.nodes, *self.needed)
        return [name for name in names if name]

    def marked(self, env: Env) -> bool:
        """Return whether the marker is there, and the variables are this launcher's own."""
        name, _, value = self.marker.partition("=")
        marked = not name or (name in env and value in ("", env[name]))
        return marked and self.applies(env)


def read_numbers(row: Launcher, env: Env) -> ProcessInfo:
    """Read a launcher that sets rank and number of processes; numbers of a node may be missing."""
    rank, world = _number(env, row.rank), _number(env, row.world_size, least=1)
    local = _number(env, row.local_world_size, world, least=1)
    return _placed(row, env, rank, world, local)


def read_partly(row: Launcher, env: Env) -> ProcessInfo:
    """Read a launcher that leaves out the number of processes, or of those of this node.

    Raises:
        ValueError: Nothing else knows that number; with the variable that it may be set by.
    """
    rank, nodes = _number(env, row.rank), _node_count(env)
    names = (row.local_world_size, "LOCAL_WORLD_SIZE")
    local_name = next((name for name in names if name in env), "")
    local = _number(env, local_name, least=1) if local_name else None
    world = _world_size(row, env, rank, nodes, local)
    if local is None:
        nodes = _number(env, row.nodes, max(1, nodes), least=1)
        if world % nodes:
            raise ValueError(
                f"{row.title} started {world} processes on {nodes} nodes, and does not tell how "
                "many are on this one; start as many on each node, or set LOCAL_WORLD_SIZE on each."
            )
        local = world // nodes
    return _placed(row, env, rank, world, local)


def _placed(row: Launcher, env: Env, rank: int, world: int, local: int) -> ProcessInfo:
    """Find the place on its node, and the address, of a process whose rank is known."""
    local_rank = _number(env, row.local_rank, rank % local)
    node_name = next((name for name in row.node if name in env), "")
    node = _number(env, node_name, rank // local)
    address = env.get("MASTER_ADDR", "")
    if row.needs_address:
        _check_address(row, env, world)
    elif not address and local < world:
        address = next(iter(_hosts(env)), "")
        if not address:
            raise ValueError(
                f"{row.title} started {world} processes, {local} of them on this node, and does "
                f"not tell the others where rank 0 is; set MASTER_ADDR: {row.address_option}."
            )
    address = address or "127.0.0.1"
    return ProcessInfo(row.name, rank, local_rank, world, local, node, address, _port(env))


def _world_size(row: Launcher, env: Env, rank: int, nodes: int, local: int | None) -> int:
    """Find the number of processes that `row` leaves out.

    Args:
        row: The launcher.
        env: The variables of the environment.
        rank: The rank of this process.
        nodes: Number of nodes of the job; 0: unknown.
        local: Number of processes on this node; None: unknown.
    """
    on_nodes = nodes * (local or 0)
    names = (row.world_size, *row.sizes, "WORLD_SIZE")
    if name := next((name for name in names if name in env), ""):
        world = _number(env, name, least=1)
        if name == "WORLD_SIZE" and world == 1 < on_nodes:  # a script around the launcher set it
            raise ValueError(
                f"the variable WORLD_SIZE is 1, but {row.title} has {local} processes on this node "
                f"and the job {nodes} nodes; unset WORLD_SIZE, or set it to the number of "
                f"processes: {row.address_option.replace('MASTER_ADDR', 'WORLD_SIZE', 1)}."
            )
        return world
    world = _mpi_size(rank, start=False) or on_nodes or _mpi_size(rank, start=True)
    if not world:
        raise ValueError(
            f"the variable {row.rank} is {env[row.rank]!r}, but {row.title} does not tell how many "
            "processes there are, and neither PBS_NODEFILE nor mpi4py does; set WORLD_SIZE to "
            f"their number on every rank, as by {row.command} with its option for variables."
        )
    return world


def _mpi_size(rank: int, *, start: bool) -> int:
    """Ask mpi4py for the number of processes; 0 if it does not know.

    A process that MPI takes for one alone may have an MPI that is not the launcher's.

    Args:
        rank: The rank that the launcher tells, which MPI must confirm.
        start: True to import mpi4py, which starts MPI, where the program has not.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None and start and importlib.util.find_spec("mpi4py") is not None:
        mpi = importlib.import_module("mpi4py.MPI")
    if mpi is None or mpi.COMM_WORLD.Get_rank() != rank:
        return 0
    size = mpi.COMM_WORLD.Get_size()
    return size if size > 1 else 0


def _check_address(row: Launcher, env: Env, world: int) -> None:
    for name, what in (("MASTER_ADDR", "host"), ("MASTER_PORT", "port")):
        if world > 1 and not env.get(name) and joined() is None:
            raise ValueError(
                f"{row.rank} is {env[row.rank]} and {row.world_size} {world}, but {name} is not "
                f"set; set it to the {what} of rank 0 on every rank, or start the processes by "
                "torchrun."
            )


def of_slurm(row: Launcher, env: Env) -> ProcessInfo:
    """Read the variables of srun, which tells the number of processes of each node."""
    node = _number(env, row.node[0])
    world, tasks = _number(env, row.world_size, least=1), env.get(row.local_world_size, "")
    tasks = [  # 2(x3),1: of each node
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
        for _ in range(min(int(times or 1), MOST))
    ]
    if sum(tasks) != world or node >= len(tasks):
        raise ValueError(
            f"{row.local_world_size} is {tasks!r}, {row.world_size} {world} and {row.node[0]} "
            f"{node}, which contradict each other; start the processes by srun."
        )
    rank, local_rank = _number(env, row.rank), _number(env, row.local_rank)
    address = env.get("MASTER_ADDR") or next(iter(_hosts(env)), "127.0.0.1")
    return ProcessInfo(row.name, rank, local_rank, world, tasks[node], node, address, _port(env))


def of_lightning(row: Launcher, env: Env) -> ProcessInfo:
    """Read the variables of a Trainer, which has no number of processes after its first stage.

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
    """Return the place of a process that no launcher has started."""
    return ProcessInfo(row.name, port=_port(env))


def joined() -> tuple[int, int] | None:
    """Read rank and number of processes of the process group; None where there is none."""
    if "torch" not in sys.modules:  # the command line loads it late
        return None
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def _hosts(env: Env) -> list[str]:
    """Name the hosts of the job, rank 0's first; [] outside of a job.

    SLURM has a list `n[1-3,5],m7`, of which the first is enough. PBS has a file with a line for
    each host, or for each process. LSF's file begins with the host that launches.
    """
    if nodes := env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST"):
        return [re.sub(r"\[(\d+)[^]]*\]", r"\1", nodes).split(",")[0]]
    for name, skipped in (("PBS_NODEFILE", 0), ("LSB_DJOB_RANKFILE", 1)):
        try:
            lines = Path(env[name]).read_text().split()[skipped:]
        except (KeyError, OSError):
            continue
        return list(dict.fromkeys(lines))
    return []


def _node_count(env: Env) -> int:
    """Count the nodes of the job; 0: unknown."""
    if "SLURM_JOB_ID" in env:
        return _number(env, "SLURM_JOB_NUM_NODES", 0)
    return len(_hosts(env))


def _port(env: Env) -> int:
    if env.get("MASTER_PORT"):
        return _number(env, "MASTER_PORT", least=1, most=65535)
    step = next((env[name] for name in _STEP_IDS if name in env), "")
    job = next((env[name] + step for name in _JOB_IDS if name in env), None)
    if job is None:  # one parent on one node, as under hydra
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
