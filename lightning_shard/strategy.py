"""HybridShardStrategy: FSDP2 and domain decomposition behind `Trainer(strategy=...)`."""

import itertools
import math
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard.batch import ShardDims, shard_batch
from lightning_shard.checkpoint import (
    full,
    full_module_state,
    full_optimizer_state,
    load_optimizer_state,
)
from lightning_shard.clip import clip_grad_norm_
from lightning_shard.failure import FailureWatch
from lightning_shard.parallelize import make_mesh, mesh_names, parallelize
from lightning_shard.resumable import make_resumable

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class HybridShardStrategy(ParallelStrategy):
    """Shards parameters over all processes and splits the fields of each sample over some of them.

    The processes form a mesh of data replicas x domain ranks. Data replicas read different samples; the
    ranks of a domain read the same samples and keep a part of each. The LightningModule is not changed
    and sees tensors of the global shape; its losses, gradients and buffers equal those of one process.
    """

    strategy_name = "hybrid_shard"

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        domain_parallel_size: int | Sequence[int] = 1,
        shard_dims: int | Sequence[int] | dict[str, int | Sequence[int] | None] | None = None,
        timeout_s: float = 1800.0,
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        """Describe the mesh.

        Args:
            data_parallel_size: Number of data replicas; "auto": all processes divided by the domain.
            domain_parallel_size: Processes that share each sample: a number, or one for each split dim,
                such as `[2, 2]`.
            shard_dims: Tensor dims that the domain splits. By default the first spatial dims of every
                floating-point batch entry (B, C, *spatial). An int or a list: these dims instead. A
                dict: for each batch entry its dims; entries that are not named stay whole.
            timeout_s: Seconds after which a collective that does not end fails.
            process_group_backend: By default the device's: nccl, xccl or gloo.
            accelerator: Set by the Trainer.
            parallel_devices: Set by the Trainer.
            cluster_environment: Set by the Trainer.
            checkpoint_io: How files are written; by default Lightning's.
            precision_plugin: Set by the Trainer.

        Raises:
            ValueError: A size is smaller than 1.
        """
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        domain = domain_parallel_size
        self.domain_sizes = (domain,) if isinstance(domain, int) else tuple(domain)
        sizes = [*self.domain_sizes, 1 if data_parallel_size == "auto" else data_parallel_size]
        if not self.domain_sizes or min(sizes) < 1:
            raise ValueError(
                "data_parallel_size and domain_parallel_size must be 1 or more; got "
                f"{data_parallel_size} and {domain_parallel_size}."
            )
        self.data_parallel_size = data_parallel_size
        self.shard_dims: ShardDims = shard_dims
        self.num_nodes = 1
        self.device_mesh: DeviceMesh | None = None
        self._timeout = timedelta(seconds=timeout_s)
        self._backend = process_group_backend
        self._moved: dict[Any, Any] = {}
        self._failure: FailureWatch | None = None
        self._alone: bool | None = None

    # -- ranks and devices

    @property
    def is_distributed(self) -> bool:
        """Lightning asks before it injects a sampler."""
        return True

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def domain_size(self) -> int:
        return math.prod(self.domain_sizes)

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks of a domain read the same samples, data replicas different ones."""
        return {
            "num_replicas": self.world_size // self.domain_size,
            "rank": self.global_rank // self.domain_size,
        }

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Autocast on the accelerator's device (Lightning 2.6 says cuda for each but the CPU)."""
        self._precision_plugin = plugin
        if isinstance(plugin, MixedPrecision) and self.accelerator is not None and self.parallel_devices:
            plugin.device = self.parallel_devices[0].type
        if plugin is not None:
            plugin.clip_grad_by_norm = clip_grad_norm_

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = utilities_rank_zero_only.rank = self.global_rank

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        processes = self.num_processes * self.num_nodes
        if not environment.creates_processes_externally and processes > 1:
            self._launcher = _SubprocessScriptLauncher(environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        if self.device_mesh is None:
            data = self._data_size()
            device = self.root_device
            backend = self._backend or _get_default_process_group_backend_for_device(device)
            place = {} if device.type == "cpu" else {"device_id": device}
            _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, **place)
            self.device_mesh = make_mesh(device.type, data, self.domain_sizes)
        if self._failure is None and self.world_size > 1:
            self._failure, self._alone = FailureWatch(self.global_rank), None
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self.device_mesh

    def _data_size(self) -> int:
        world = self.world_size
        if world % self.domain_size:
            raise ValueError(
                f"domain_parallel_size {self.domain_size} does not divide the {world} processes; use one "
                f"of {[n for n in range(1, world + 1) if world % n == 0]}, or start a multiple of "
                f"{self.domain_size} processes."
            )
        data = world // self.domain_size
        if self.data_parallel_size not in ("auto", data):
            raise ValueError(
                f"data_parallel_size {self.data_parallel_size} x domain_parallel_size "
                f"{self.domain_size} must be the number of processes, {world}; use data_parallel_size "
                f"{data} or 'auto'."
            )
        return data

    @property
    def domain_mesh(self) -> DeviceMesh:
        """The mesh of this rank's domain."""
        assert self.device_mesh is not None
        return self.device_mesh[mesh_names(len(self.domain_sizes))[1:]]

    # -- model, optimizers, data

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # FSDP2 trains no parameter that was first seen in it
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.lightning_module)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        assert self.device_mesh is not None
        self._moved |= parallelize(self.lightning_module, self.device_mesh, methods=STEPS)
        self._share_random_state()
        self.barrier("HybridShardStrategy.setup")
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _share_random_state(self) -> None:
        """The ranks of a domain draw the same random numbers for what they all compute."""
        if self.domain_size > 1:
            states = [torch.get_rng_state()]
            root = self.global_rank - self.global_rank % self.domain_size
            mesh = self.domain_mesh
            for axis in reversed(range(mesh.ndim)):
                dist.broadcast_object_list(
                    states, group=mesh.get_group(axis), group_src=0, device=self.root_device
                )
            if self.global_rank != root:
                torch.set_rng_state(states[0])

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        mine = set(self.lightning_module.parameters())
        for group in itertools.chain.from_iterable(o.param_groups for o in self.optimizers):
            group["params"] = [p if p in mine else self._moved.get(p, p) for p in group["params"]]
            if any(p not in mine for p in group["params"]):
                raise RuntimeError(
                    "an optimizer holds parameters that are not the module's, so it would train nothing; "
                    "create it in configure_optimizers from self.parameters()."
                )

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return batch if self.domain_size == 1 else shard_batch(batch, self.domain_mesh, self.shard_dims)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Seed loader workers by data replica: the ranks of a domain must augment a sample alike."""
        if isinstance(dataloader, DataLoader):
            if dataloader.worker_init_fn is None:
                replica = self.distributed_sampler_kwargs["rank"]
                dataloader.worker_init_fn = partial(pl_worker_init_function, rank=replica)
            assert self.lightning_module is not None
            make_resumable(dataloader, self.lightning_module.trainer)
        return dataloader

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert self.lightning_module is not None
        sharded = [m for m in self.lightning_module.modules() if isinstance(m, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)

    @override
    def on_predict_start(self) -> None:
        """Prediction sets of uneven length: no collective of FSDP2 may depend on the batch."""
        self._keep_parameters_whole(True)

    @override
    def on_predict_end(self) -> None:
        self._keep_parameters_whole(False)

    def _keep_parameters_whole(self, keep: bool) -> None:
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(not keep, recurse=False)
                (module.unshard if keep else module.reshard)()

    # -- collectives of the host

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._cut_off() and dist.is_initialized():
            devices = {} if self.root_device.type == "cpu" else {"device_ids": [self.root_device.index]}
            dist.barrier(**devices)

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
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def _cut_off(self) -> bool:
        """Whether an exception on some of the ranks forbids collectives."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        if self._failure is None or trainer is None or trainer.state.status != TrainerStatus.INTERRUPTED:
            return False
        if self._alone is None:  # callbacks hear of an exception before the strategy does
            self._alone = self._failure.reported_alone(sys.exception(), self.world_size)
        return self._alone

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._cut_off()

    # -- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return {} if self._cut_off() else full_module_state(self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        assert self.lightning_module is not None
        return {} if self._cut_off() else full_optimizer_state(plain, self.lightning_module)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if not self._cut_off():
            super().save_checkpoint(full(checkpoint), filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(optimizer, state, self.lightning_module)

    @override
    def teardown(self) -> None:
        if self._failure is not None:
            self._failure.close()
            self._failure = None
        if not isinstance(self.lightning_module, FSDPModule):
            super().teardown()
            return
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()  # shards stay on the device of their mesh
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def register() -> None:
    """Give the strategy its name, once."""
    if HybridShardStrategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(
            HybridShardStrategy.strategy_name,
            HybridShardStrategy,
            description="FSDP2 and spatial domain decomposition on one device mesh",
        )


register()
