"""The processes as a mesh: what a strategy tells Lightning of ranks, devices and collectives."""

import math
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backend import default_backend
from lightning_shard.clip import clip_grad_norm_, clip_grad_value_
from lightning_shard.explain import explain
from lightning_shard.failure import FailureWatch
from lightning_shard.launcher_strategy import LauncherStrategy
from lightning_shard.materialize import is_deferred
from lightning_shard.mesh import make_mesh, mesh_names
from lightning_shard.ops import UnsupportedOperationError
from lightning_shard.precision import use_device
from lightning_shard.ranks import divide, reduce
from lightning_shard.requeue import save_before_requeue
from lightning_shard.tensor import DomainTensor

# with which ranks that differ would call other collectives, or train other weights
TRAINER_OPTIONS = (
    "max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "limit_predict_batches", "overfit_batches", "val_check_interval", "check_val_every_n_epoch",
    "num_sanity_val_steps", "num_nodes",
)  # fmt: skip


class MeshStrategy(LauncherStrategy):
    """One process per device, arranged as data replicas x domain ranks."""

    offloads = False  # whether shards are in CPU memory

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"],
        domain_parallel_size: int | Sequence[int],
        timeout_s: float,
        process_group_backend: str | None,
        shard_size: int | Literal["node"] | None,
        **host: Any,
    ) -> None:
        super().__init__(**host)
        domain = domain_parallel_size
        self.domain_sizes = (domain,) if isinstance(domain, int) else tuple(domain)
        sizes = [*self.domain_sizes, 1 if data_parallel_size == "auto" else data_parallel_size]
        if not self.domain_sizes or min(sizes) < 1:
            raise ValueError(
                "data_parallel_size and domain_parallel_size must be 1 or more; got "
                f"{data_parallel_size} and {domain_parallel_size}."
            )
        self.data_parallel_size = data_parallel_size
        self.shard_size: int | Literal["node"] | None = shard_size
        self.device_mesh: DeviceMesh | None = None
        self.timeout_s = timeout_s
        self._backend = process_group_backend
        self._deferred = False
        self._failure: FailureWatch | None = None
        self._alone: bool | None = None

    @property
    def is_distributed(self) -> bool:
        """Lightning asks before it injects a sampler."""
        return True

    @property
    def domain_size(self) -> int:
        return math.prod(self.domain_sizes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks of a domain read the same samples, data replicas different ones."""
        return {
            "num_replicas": self.world_size // self.domain_size,
            "rank": self._coordinate(is_domain=False),
        }

    @property
    def domain_rank(self) -> int:
        """Of this process among those that share its samples."""
        return self._coordinate(is_domain=True)

    def _coordinate(self, *, is_domain: bool) -> int:
        if self.device_mesh is None:
            return divmod(self.global_rank, self.domain_size)[is_domain]
        names = mesh_names(len(self.domain_sizes))[1:] if is_domain else ("data",)
        index = 0
        for name in names:
            axis = self.device_mesh[name]
            index = index * axis.size() + axis.get_local_rank()
        return index

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Gradients are clipped by their norm over all shards."""
        plugin = self._precision_plugin = precision_plugin
        if plugin is not None:

            def by_norm(optimizer: Optimizer, clip_val: float) -> None:
                clip_grad_norm_(plugin.main_params(optimizer), clip_val)

            def by_value(optimizer: Optimizer, clip_val: float) -> None:
                clip_grad_value_(plugin.main_params(optimizer), clip_val)

            plugin.clip_grad_by_norm, plugin.clip_grad_by_value = by_norm, by_value

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        use_device(self.precision_plugin, self.root_device.type)
        if self.root_device.type == "cpu" and torch.xpu.is_available():
            rank_zero_warn(
                "An Intel GPU is available but not used (Lightning's 'auto' does not know it). "
                "Use it with Trainer(accelerator='xpu').",
                category=PossibleUserWarning,
            )
        self._deferred = False
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        if self.device_mesh is None:
            data = self._data_size()
            device = self.root_device
            backend = self._backend or default_backend(device)
            if self.offloads and device.type != "cpu" and ":" not in backend:
                backend = f"cpu:gloo,{device.type}:{backend}"  # shards are gathered on the CPU, too
            self.start(device, backend)
            carried = [entry.split(":")[0] for entry in dist.get_backend_config().split(",")]
            if self.offloads and "cpu" not in carried:  # the group was there before
                raise RuntimeError(
                    "cpu_offload gathers shards on the CPU, of which the process group, made with "
                    f"'{dist.get_backend_config()}', knows no tensors; make it with 'cpu:gloo,"
                    f"{dist.get_backend_config()}', or let the Trainer make it."
                )
            shared_by = self.num_processes if self.shard_size == "node" else self.shard_size
            self.device_mesh = make_mesh(device.type, data, self.domain_sizes, shard_size=shared_by)
        if self._failure is None and self.world_size > 1:
            self._failure, self._alone = FailureWatch(self.global_rank), None
        self.compare("options", self.options_alike())
        assert self.lightning_module is not None
        if self.world_size > 1:
            save_before_requeue(self.lightning_module.trainer, self.cluster_environment)
        self.lightning_module._device_mesh = self.device_mesh

    def options_alike(self) -> dict[str, str]:
        """What all ranks must have alike, by name."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        given = {
            "domain_parallel_size": self.domain_sizes,
            "data_parallel_size": self.data_parallel_size,
            "precision": type(self.precision_plugin).__name__,
            **{f"the Trainer's {name}": getattr(trainer, name, None) for name in TRAINER_OPTIONS},
        }
        return {**self.config, **{name: str(value) for name, value in given.items()}}

    def _data_size(self) -> int:
        world = self.world_size
        if world % self.domain_size:
            raise ValueError(
                f"domain_parallel_size {self.domain_size} does not divide the {world} processes; "
                f"use one of {[n for n in range(1, world + 1) if world % n == 0]}, or start a "
                f"multiple of {self.domain_size} processes."
            )
        data = world // self.domain_size
        if self.data_parallel_size not in ("auto", data):
            raise ValueError(
                f"data_parallel_size {self.data_parallel_size} x domain_parallel_size "
                f"{self.domain_size} must be the number of processes, {world}; use "
                f"data_parallel_size {data} or 'auto'."
            )
        return data

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of different samples; None before the mesh is made."""
        return None if self.device_mesh is None else self.device_mesh["data"].get_group()

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether the module has memory to load into only once it is sharded.

        Lightning asks before setup and after it, and must hear the same.
        """
        module = self.lightning_module
        self._deferred = self._deferred or (module is not None and is_deferred(module))
        return self._deferred

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """With `empty_init`, tensors are made on the meta device, and get memory in setup."""
        if not empty_init:
            with super().tensor_init_context(empty_init):
                yield
        else:
            with torch.device("meta"), self.precision_plugin.tensor_init_context():
                yield

    @property
    def domain_mesh(self) -> DeviceMesh:
        """The mesh of this rank's domain."""
        assert self.device_mesh is not None
        return self.device_mesh[mesh_names(len(self.domain_sizes))[1:]]

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._cut_off() or not dist.is_initialized():
            return
        if self.root_device.index is None:
            dist.barrier()
        else:
            dist.barrier(device_ids=[self.root_device.index])

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._cut_off() or not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if self._cut_off() or not isinstance(tensor, Tensor):
            return tensor
        reduced = reduce(tensor, self.root_device, group, reduce_op)
        if group is None and reduce_op == "sum":  # as self.log asks: the ranks of a domain are one
            return divide(reduced, self.domain_size)
        return reduced

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Of each data replica one entry: (replicas, *shape)."""
        if isinstance(tensor, DomainTensor):
            raise UnsupportedOperationError("all_gather of a split tensor; gather(tensor) it first")
        if group in (None, dist.group.WORLD):
            group = self.data_group
        return super().all_gather(tensor.to(self.root_device), group, sync_grads)

    def _cut_off(self) -> bool:
        """Whether an exception on some of the ranks forbids collectives."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        if (
            self._failure is None
            or trainer is None
            or trainer.state.status != TrainerStatus.INTERRUPTED
        ):
            return False
        if self._alone is None:  # callbacks hear of an exception before the strategy does
            self._alone = self._failure.reported_alone(sys.exception(), self.world_size)
        return self._alone

    @override
    def on_exception(self, exception: BaseException) -> None:
        explain(exception)
        self._cut_off()
