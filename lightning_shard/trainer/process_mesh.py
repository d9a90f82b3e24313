"""Starts the processes of a Trainer, joins them, and arranges them as a mesh."""

import atexit
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero as utilities_rank_zero
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.lightning import (
    ClusterEnvironment,
    GradientAccumulationScheduler,
    Launcher,
    LightningEnvironment,
    ParallelStrategy,
    Trainer,
    destroy_process_group,
    fabric_rank_zero,
)
from lightning_shard.processes.agreement import Check, agree, next_name, only_wait
from lightning_shard.processes.arguments import check_timeout, is_whole
from lightning_shard.processes.device import (
    backends,
    default_backend,
    device_of,
    sees_own_device_only,
)
from lightning_shard.processes.failures.lone_waits import watch_lone_waits
from lightning_shard.processes.mesh import make_mesh, mesh_names, share_mesh, sub_mesh
from lightning_shard.processes.process_info import process_info
from lightning_shard.processes.start import join
from lightning_shard.processes.store import store_of_attempt
from lightning_shard.trainer.environment import check_processes
from lightning_shard.trainer.host import callbacks_of
from lightning_shard.trainer.notebook import NotebookLauncher
from lightning_shard.trainer.same_optimizers import facts_of_optimizers, facts_of_schedules
from lightning_shard.trainer.script_launchers import SubprocessScriptLauncher

# Ranks that differ in these would call other collectives, or train other weights.
TRAINER_OPTIONS = (
    "max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "limit_predict_batches", "overfit_batches", "val_check_interval", "check_val_every_n_epoch",
    "num_sanity_val_steps", "num_nodes", "reload_dataloaders_every_n_epochs",
)  # fmt: skip
# Ranks whose ModelCheckpoints differ in these would write other files.
SAVER_OPTIONS = ("save_last", "save_top_k", "save_weights_only")
# Callbacks that exchange messages, or change the network: one rank alone would wait for the others,
# or pair its message with one of theirs.
OF_ALL_RANKS = {
    "EpochReport", "PredictionWriter", "RunReport", "StepProfile", "StopOnNonFinite",
    "BaseFinetuning", "ModelPruning",
}  # fmt: skip
PROFILE_OPTIONS = ("wait", "warmup", "active")

# lightning and lightning_utilities have a decorator each, which is told the rank by an attribute
_RANK_ZERO: list[Any] = [fabric_rank_zero.rank_zero_only, utilities_rank_zero.rank_zero_only]


class ProcessMesh:
    """Arranges one process per device as data replicas x domain ranks.

    Attributes:
        data_parallel_size: Number of data replicas; "auto": what the domain leaves.
        domain_sizes: Number of ranks along each split dim; empty for "auto" until they have joined.
        fits_itself: True if the domain is "auto": the processes that the data replicas leave.
        shard_size: Number of ranks that share one set of parameters, or "node"; None: all.
        timeout_s: Seconds after which a collective that does not end fails.
        backend: The backend of the process group; None: the device's own.
        mesh: All processes; None until they have joined.
    """

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        domain_parallel_size: int | Literal["auto"] | Sequence[int] = 1,
        *,
        shard_size: int | Literal["node"] | None = None,
        timeout_s: float = 1800.0,
        backend: str | None = None,
    ) -> None:
        """Note the sizes.

        Raises:
            ValueError: A size is no whole number from 1 on, or `timeout_s` is not positive.
        """
        domain, self.fits_itself = domain_parallel_size, domain_parallel_size == "auto"
        self.data_parallel_size: int | Literal["auto"] = data_parallel_size
        self.domain_sizes: tuple[int, ...] = ()
        if not isinstance(domain, str):
            self.domain_sizes = tuple(domain) if isinstance(domain, Sequence) else (domain,)
        self.shard_size: int | Literal["node"] | None = shard_size
        self.timeout_s, self.backend = timeout_s, backend
        self.mesh: DeviceMesh | None = None
        sizes = [
            *self.domain_sizes,
            *([] if data_parallel_size == "auto" else [data_parallel_size]),
        ]
        known = self.domain_sizes or domain == "auto"
        if not known or not all(is_whole(size) for size in sizes):
            raise ValueError(
                "data_parallel_size and domain_parallel_size must be 1 or more, or 'auto'; got "
                f"{data_parallel_size!r} and {domain_parallel_size!r}."
            )
        check_timeout(timeout_s)

    @property
    def domain_size(self) -> int:
        """The number of ranks that share each sample.

        Raises:
            RuntimeError: It is "auto", and the processes have not joined yet.
        """
        if not self.domain_sizes:
            raise RuntimeError(
                "domain_parallel_size is 'auto', so the size of the domain is known once the "
                "processes have joined; ask in setup or later."
            )
        return math.prod(self.domain_sizes)

    @property
    def domain_mesh(self) -> DeviceMesh:
        """The mesh of the ranks that share this rank's samples."""
        assert self.mesh is not None, "the processes have not joined yet"
        return sub_mesh(self.mesh, mesh_names(len(self.domain_sizes))[1:])

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of different samples; None before the mesh is made."""
        return None if self.mesh is None else sub_mesh(self.mesh, ("data",)).get_group()

    def replica(self, rank: int) -> int:
        """Return the data replica of this process, whose global rank is `rank`."""
        if self.mesh is None:
            return rank // self.domain_size
        return sub_mesh(self.mesh, ("data",)).get_local_rank()

    def replicas(self) -> list[int]:
        """Return the data replica of each process, by global rank."""
        assert self.mesh is not None
        rows = self.mesh.mesh.reshape(-1, self.domain_size).tolist()  # data axes come first
        places = {rank: replica for replica, row in enumerate(rows) for rank in row}
        return [places[rank] for rank in sorted(places)]

    def domain_rank(self, rank: int) -> int:
        """Return the place of this process, of global rank `rank`, among those of its samples."""
        if self.mesh is None:
            return rank % self.domain_size
        index = 0
        for name in mesh_names(len(self.domain_sizes))[1:]:
            axis = sub_mesh(self.mesh, (name,))
            index = index * axis.size() + axis.get_local_rank()
        return index

    def join(
        self, environment: ClusterEnvironment, device: torch.device, *, offloads: bool = False
    ) -> None:
        """Start the process group, unless an earlier stage has.

        Args:
            environment: The ranks and the address that the launcher has chosen.
            device: The device of this process.
            offloads: True if shards are in CPU memory, which the group must then carry, too.

        Raises:
            ValueError: The sizes do not fit the number of processes.
            RuntimeError: The group was there before and does not carry CPU memory.
        """
        self._data_size(environment.world_size())
        backend = self.backend or default_backend(device)
        if offloads and device.type != "cpu" and ":" not in backend:
            backend = f"cpu:gloo,{device.type}:{backend}"  # shards are gathered on the CPU, too
        start_group(environment, device, backend=backend, timeout_s=self.timeout_s)
        if offloads:
            _check_that_cpu_is_carried()

    def arrange(self, device: torch.device, *, per_node: int) -> DeviceMesh:
        """Return the mesh of the processes that have joined; the first stage makes it."""
        if self.mesh is None:
            data = self._data_size(dist.get_world_size())
            shared_by = per_node if self.shard_size == "node" else self.shard_size
            self.mesh = make_mesh(device.type, data, self.domain_sizes, shard_size=shared_by)
        watch_lone_waits(in_trainer=True)
        share_mesh(self.mesh)
        return self.mesh

    def _data_size(self, world: int) -> int:
        """Return the number of data replicas, and fill in a domain that is "auto"."""
        if self.fits_itself:
            self.domain_sizes = domain_that_is_left(world, self.data_parallel_size)
        refuse_misfit(world, self.domain_sizes, self.data_parallel_size)
        return world // self.domain_size

    def compare(self, what: str, same: Mapping[str, str], *, check: Check = only_wait) -> None:
        """Raise on all ranks if they differ in `same`, through the store, which cannot hang.

        Args:
            what: A name for the comparison.
            same: Values that must be equal on all ranks, by name.
            check: Raises if one of the ranks that are waited for does not come any more.

        Raises:
            ValueError: Two ranks differ.
        """
        if dist.get_world_size() > 1:
            agree(
                store_of_attempt(),
                next_name(what),
                same,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                remedy="start all ranks with the same code, options and files",
                timeout_s=self.timeout_s,
                check=check,
            )

    def compare_optimizers(
        self, optimizers: Sequence[Any], schedules: Sequence[Any] = (), *, check: Check
    ) -> None:
        """Raise on all ranks if their optimizers differ: their weights would drift apart.

        Args:
            optimizers: The optimizers of one program, in its order.
            schedules: Lightning's configs of schedules of learning rates.
            check: Raises if one of the ranks that are waited for does not come any more.

        Raises:
            ValueError: Two ranks differ in a class, in the parameters, or in an option.
        """
        same = facts_of_optimizers(optimizers) | facts_of_schedules(schedules)
        self.compare("optimizers", same, check=check)


def domain_that_is_left(world: int, data: int | Literal["auto"]) -> tuple[int, ...]:
    """Return the size of a domain that is "auto": all processes divided by the data replicas."""
    return (max(1, world // (1 if data == "auto" else data)),)


def refuse_misfit(world: int, domain: Sequence[int], data: int | Literal["auto"]) -> None:
    """Compare the sizes of a mesh with the number of processes.

    Args:
        world: The number of processes.
        domain: The number of ranks along each split dim.
        data: The number of data replicas; "auto" fits if the domain divides the processes.

    Raises:
        ValueError: They do not fit.
    """
    per_sample, shape = math.prod(domain), " x ".join(map(str, domain))
    processes = "1 process" if world == 1 else f"{world} processes"
    if world % per_sample:
        fitting = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise ValueError(
            f"domain_parallel_size {shape} does not divide the {processes}; "
            f"use {'' if world == 1 else 'one of '}{fitting}, or start a multiple of {per_sample} "
            f"processes, as devices={per_sample} does."
        )
    if data not in ("auto", world // per_sample):
        raise ValueError(
            f"data_parallel_size {data} x domain_parallel_size {shape} is {data * per_sample}, not "
            f"the {processes}; use data_parallel_size {world // per_sample} or auto."
        )


def start_group(
    environment: ClusterEnvironment, device: torch.device, *, backend: str, timeout_s: float
) -> None:
    """Start the process group, as Lightning does, after the ranks have compared themselves."""
    if dist.is_initialized():
        return
    address = os.environ["MASTER_ADDR"] = environment.main_address
    port = os.environ["MASTER_PORT"] = str(environment.main_port)
    join(
        environment.global_rank(),
        environment.world_size(),
        f"{address}:{port}",
        device=device,
        backend=backend,
        timeout_s=timeout_s,
    )
    if device_of(device.type).ends_groups:
        atexit.register(destroy_process_group)


def _check_that_cpu_is_carried() -> None:
    if "cpu" not in backends():  # the group was there before
        raise RuntimeError(
            "cpu_offload gathers shards on the CPU, of which the process group, made with "
            f"'{dist.get_backend_config()}', knows no tensors; make it with 'cpu:gloo,"
            f"{dist.get_backend_config()}', or let the Trainer make it."
        )


def launcher_of(
    strategy: ParallelStrategy, environment: ClusterEnvironment, *, per_node: int, nodes: int
) -> Launcher | None:
    """Choose what starts the Trainer's other processes; None where a launcher did, or for one.

    Raises:
        ValueError: The launcher has started another number of processes than the Trainer was told.
    """
    check_processes(environment, per_node, nodes)
    if environment.creates_processes_externally or per_node * nodes == 1:
        return None
    interactive = hasattr(sys, "ps1")
    if interactive and nodes == 1 and type(environment) is LightningEnvironment:
        return NotebookLauncher(strategy)
    return SubprocessScriptLauncher(environment, per_node, nodes)


def processes_of_node(
    environment: ClusterEnvironment | None, devices: Sequence[torch.device]
) -> int:
    """Count the processes of this node: one for each device that is seen.

    Where the launcher shows each process one device only, it is the launcher's number.
    """
    if len(devices) != 1 or environment is None or not environment.creates_processes_externally:
        return len(devices)
    local = process_info().local_world_size
    return local if sees_own_device_only(devices[0].type, local) else 1


def started_nodes(environment: ClusterEnvironment, *, per_node: int, nodes: int) -> int:
    """Count the nodes on which a launcher has started processes; without a launcher: `nodes`."""
    world = environment.world_size()
    external = environment.creates_processes_externally
    return nodes if not external or world % per_node else world // per_node


def tell_ranks(environment: ClusterEnvironment, *, per_node: int, nodes: int) -> None:
    """Set the ranks of Lightning's environment, where the Trainer starts the processes itself."""
    node, local = environment.node_rank(), environment.local_rank()
    environment.set_global_rank(node * per_node + local)
    environment.set_world_size(nodes * per_node)


def print_on_first_only(rank: int) -> None:
    """Give the decorators `rank_zero_only` the rank of this process."""
    for decorator in _RANK_ZERO:
        decorator.rank = rank


def options_of_all_ranks(trainer: Trainer) -> dict[str, str]:
    """Read the options of the Trainer that all ranks must have alike, by name."""
    options: dict[str, Any] = _found(trainer, TRAINER_OPTIONS)
    together = (*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks)
    options["callbacks that save or stop"] = [
        f"{callback.state_key}, {_found(callback, SAVER_OPTIONS)}" for callback in together
    ]
    options["callbacks that need all ranks"] = sorted(
        f"{type(callback).__name__} {_found(callback, PROFILE_OPTIONS) or ''}".strip()
        for callback in callbacks_of(trainer)
        if OF_ALL_RANKS & {kind.__name__ for kind in type(callback).__mro__}
    )
    options["schedule of accumulate_grad_batches"] = [
        callback.scheduling
        for callback in callbacks_of(trainer)
        if isinstance(callback, GradientAccumulationScheduler)
    ]
    return {f"the Trainer's {name}": str(value) for name, value in options.items()}


def _found(owner: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}
