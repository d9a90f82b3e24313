"""Adapts launchers that Lightning 2.6 does not know, or knows only with mpi4py."""

import os

from typing_extensions import override

from lightning_shard.lightning import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning_shard.processes.process_info import ALONE, CHOICE, launcher, process_info
from lightning_shard.processes.variables import ProcessInfo


class LauncherEnvironment(ClusterEnvironment):
    """Gives Lightning the ranks and the address that `process_info` finds."""

    def __init__(self, info: ProcessInfo) -> None:
        """Take the ranks and the address from `info`."""
        super().__init__()
        self.info = info

    @property
    @override
    def creates_processes_externally(self) -> bool:
        """True: the launcher has started all processes."""
        return True

    @property
    @override
    def main_address(self) -> str:
        """The host of rank 0."""
        return self.info.address

    @property
    @override
    def main_port(self) -> int:
        """The port of the store on rank 0's host."""
        return self.info.port

    @staticmethod
    @override
    def detect() -> bool:
        """Return whether a launcher has started several processes."""
        return process_info().world_size > 1

    @override
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.info.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """Leave it as the launcher has set it."""

    @override
    def global_rank(self) -> int:
        """Return the number of this process among all."""
        return self.info.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Leave it as the launcher has set it."""

    @override
    def local_rank(self) -> int:
        """Return the number of this process on its node."""
        return self.info.local_rank

    @override
    def node_rank(self) -> int:
        """Return the number of this node."""
        return self.info.node


class StepEnvironment(LauncherEnvironment, SLURMEnvironment):
    """Counts the tasks of this `srun`, which may be fewer than those of its job.

    The step has a port of its own, too: two may run in one job at the same time.
    """

    def __init__(self, found: SLURMEnvironment) -> None:
        """Take how a job is queued again from the environment that was `found`."""
        super().__init__(process_info())
        self.auto_requeue, self.requeue_signal = found.auto_requeue, found.requeue_signal


def environment_of_launcher(found: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """Return the launcher's environment where Lightning has `found` none or the wrong one.

    Raises:
        ValueError: The launcher's variables are incomplete or wrong, or SLURM's tasks were not
            started.
    """
    if type(found) is SLURMEnvironment and launcher().name == "slurm":
        return StepEnvironment(found)
    if os.environ.get(CHOICE):
        return _of_chosen(found)
    if found is not None and type(found) in (MPIEnvironment, LSFEnvironment):
        _compare(found)
    if type(found) not in (LightningEnvironment, SLURMEnvironment):
        return found
    started_by = launcher()
    if started_by.starts_all:
        info = process_info()
        if not started_by.known_to_lightning:
            return LauncherEnvironment(info) if info.world_size > 1 else found
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if isinstance(found, SLURMEnvironment) and started_by is ALONE and tasks != "1":
        raise ValueError(
            f"SLURM has {tasks} tasks for this job, but this process was not started by srun and "
            "would wait for the others; write `srun python ...` in the job's script."
        )
    return found


def _compare(found: ClusterEnvironment) -> None:
    """Compare an environment that Lightning found with the launcher's variables, if they suffice.

    Raises:
        ValueError: They contradict each other.
    """
    try:
        info = process_info()
    except ValueError:  # MPI itself knows more than the variables
        return
    by_lightning = found.global_rank(), found.world_size()
    if info.distributed and by_lightning != (info.rank, info.world_size):
        raise ValueError(
            f"Lightning's {type(found).__name__} says that this is rank {by_lightning[0]} of "
            f"{by_lightning[1]}, but the variables of {launcher().title} say rank {info.rank} of "
            f"{info.world_size}; unset those that another launcher has left, or set {CHOICE} to "
            "the one to believe."
        )


def _of_chosen(found: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """Return the environment of the launcher that the user has named, not of Lightning's choice."""
    kinds = {"torchrun": TorchElasticEnvironment, "slurm": SLURMEnvironment}
    kinds |= {"none": LightningEnvironment, "lightning": LightningEnvironment}
    kinds["notebook"] = TorchElasticEnvironment
    started_by = launcher()
    if type(found) not in kinds.values() or type(found) is kinds.get(started_by.name):
        return found
    return LauncherEnvironment(process_info()) if started_by.starts_all else LightningEnvironment()


def check_processes(
    environment: ClusterEnvironment, devices: int, nodes: int, host: str = "Trainer"
) -> None:
    """Compare the number of processes that a launcher has started with the arguments of a host.

    Args:
        environment: The launcher's.
        devices: The number of devices on each node that the host was given.
        nodes: The number of nodes that it was given.
        host: The class that was given them.

    Raises:
        ValueError: They differ.
    """
    started = environment.world_size()
    if environment.creates_processes_externally and started != devices * nodes > 0:
        local = _local_processes(started) or max(1, started // nodes)
        raise ValueError(
            f"{launcher().title} started {started} processes, but {host}(devices={devices}, "
            f"num_nodes={nodes}) asks for {devices * nodes}; use {host}(devices={local}, "
            f"num_nodes={started // local}), or start {devices * nodes}."
        )


def _local_processes(started: int) -> int | None:
    """Return how many processes each node has, if the launcher tells and they are equally many.

    A host that was told of one node would else be advised to see the devices of all.
    """
    try:
        info = process_info()
    except ValueError:  # MPI itself knows more than the variables
        return None
    is_even = info.world_size == started and started % info.local_world_size == 0
    return info.local_world_size if is_even else None
