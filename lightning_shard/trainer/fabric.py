"""FabricShardStrategy: FSDP2 and domain decomposition behind `Fabric(strategy=...)`.

The parts are the Trainer's: `ProcessMesh`, `Peers`, `Saver`, the sharding of parameters. The loop
is the user's, so nothing here counts steps.
"""

import copy
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from typing_extensions import override

from lightning_shard.checkpoint.state import full, load_optimizer_state
from lightning_shard.checkpoint.weights import load_module_state
from lightning_shard.data.same_batch import check_same_batch
from lightning_shard.data.split import shard_batch
from lightning_shard.fsdp.clip import clip_grad_norm_, clip_grad_value_
from lightning_shard.fsdp.no_sync import no_sync
from lightning_shard.lightning import (
    STRATEGY_REGISTRY,
    BackwardSyncControl,
    FabricParallelStrategy,
    FabricPrecision,
    move_data_to_device,
    pl_worker_init_function,
    rank_zero_warn,
)
from lightning_shard.ops.elementwise.random import use_exact_random
from lightning_shard.processes.errors_together import together
from lightning_shard.trainer import sharding as parameters
from lightning_shard.trainer.environment import check_processes
from lightning_shard.trainer.fabric_modules import around_loop, refuse_unreduced, shard_again
from lightning_shard.trainer.fabric_wrappers import Alike, Entered, Shards, entered, through
from lightning_shard.trainer.host import own_batches
from lightning_shard.trainer.metrics_once import count_metrics_over
from lightning_shard.trainer.on_mesh import ShardStrategy, register
from lightning_shard.trainer.precision import refuse_to_drop_imaginary_parts
from lightning_shard.trainer.random_state import share_random_state, share_seeded_state
from lightning_shard.trainer.replica_samplers import (
    Stride,
    count_replicas_in,
    drops_last,
    own_sampler,
    read_in_order,
    refuse_unread,
    with_sampler,
)
from lightning_shard.trainer.same_loop import SameLoop
from lightning_shard.trainer.script_launchers import FabricScriptLauncher
from lightning_shard.trainer.split_summary import split_summary
from lightning_shard.trainer.steps import step_by_mean_loss
from lightning_shard.trainer.streams import compared_at_end


class FabricShardStrategy(ShardStrategy, FabricParallelStrategy):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride] - ShardStrategy comes first
    """Shards parameters and splits batches in a loop of Fabric.

    Each method does for a loop of one's own what HybridShardStrategy does for the Trainer.
    """

    _PRECISION = "precision"

    @override
    def _complete(self) -> None:
        """Refuse what is the Trainer's, and begin without a module.

        Raises:
            ValueError: A checkpoint is to be a directory.
        """
        if self.saver.format not in ("auto", "single"):
            raise ValueError(
                f"checkpoint_format {self.saver.format!r} is a directory of the Trainer's; Fabric "
                "writes one file: use checkpoint_format='single'."
            )
        self._num_nodes = 1
        self._backward_sync_control = _NoSync()
        self._modules: list[nn.Module] = []
        self._samplers_wanted = False
        self._until_end = ExitStack()
        self._same = SameLoop()

    def __deepcopy__(self, memo: dict[int, Any]) -> "FabricShardStrategy":
        """Return this one: a copy of a module of Fabric, such as an average, runs on its mesh."""
        return self

    # The mesh.

    @property
    def num_nodes(self) -> int:
        """The number of nodes, which Fabric sets."""
        return self._num_nodes

    @property
    @override
    def distributed_sampler_kwargs(self) -> None:
        """Return None: `process_dataloader` chooses the samples, in the order of one process.

        Fabric asks for it unless a loader is to keep its sampler, and says so in no other way.
        """
        self._samplers_wanted = True

    @property
    @override
    def precision(self) -> FabricPrecision:
        """The plug-in for the precision, set by Fabric."""
        return super().precision

    @precision.setter
    def precision(self, precision: FabricPrecision | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Take the plug-in, and refuse modules whose complex numbers it would make real."""
        self._precision = precision
        if precision is not None:
            convert = precision.convert_module

            def checked(module: nn.Module) -> nn.Module:
                refuse_to_drop_imaginary_parts(module, precision)
                return convert(module)

            vars(precision)["convert_module"] = checked

    @override
    def _configure_launcher(self) -> None:
        environment, nodes = self.cluster_environment, self.num_nodes
        self.set_world_ranks()
        check_processes(environment, self.num_processes, nodes, "Fabric")
        if not environment.creates_processes_externally and self.num_processes * nodes > 1:
            self._launcher = FabricScriptLauncher(environment, self.num_processes, nodes)

    @override
    def setup_environment(self) -> None:
        """Start the process group, compare the options of the ranks, and arrange the mesh."""
        super().setup_environment()
        self.join(self.precision)
        self.peers.tell_uncaught()
        alike = self.options_alike(self.precision)
        self.processes.compare("options", alike, check=self.peers.check)
        self.processes.arrange(self.root_device, per_node=self.num_processes)
        share_seeded_state(self.root_device)
        if self.exact_random is not None:
            self._until_end.enter_context(use_exact_random(self.exact_random))
        self._same.begin_loop(self.domain_mesh, self.root_device)
        loop = around_loop(self._modules, self.device_mesh, self.domain_mesh, self._same)
        self._until_end.enter_context(loop)

    @override
    def teardown(self) -> None:
        """Give the random numbers of the process back, and stop to watch the other ranks."""
        self._until_end.close()
        self.peers.pause_watch()
        super().teardown()

    # Modules and optimizers.

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Make parameters on the meta device with `empty_init`; setup gives them memory."""
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Move what has memory; parameters on the meta device get theirs in `setup_module`."""
        parameters.to_device(module, self.root_device)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the parameters, and let metrics count the samples of each domain once."""
        self.shard(module, files=self.first_weights)
        self._modules.append(module)
        share_random_state(self.domain_mesh, self.root_device)
        self._count_metrics()
        return Entered(module) if isinstance(module, FSDPModule) else module

    def _count_metrics(self) -> None:
        """Let metrics count the data replicas until another run begins; each batch says it again.

        A loop of Fabric has no end that it tells.
        """
        count_metrics_over(self.data_group, self.domain_mesh, lambda: True, lambda: False)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give the optimizer the sharded parameters for those that it was made with.

        Raises:
            RuntimeError: It has a state already, whose tensors are whole.
        """
        if optimizer.state:
            raise RuntimeError(
                "the optimizer has a state of parameters before they are sharded; give "
                "fabric.setup a new optimizer, and load its state with fabric.load."
            )
        parameters.mend_optimizers([optimizer], nn.ModuleList(self._modules), self._moved)
        if self.world_size > 1:
            self.processes.compare_optimizers([optimizer], check=self.peers.check)
            step_by_mean_loss([optimizer])
        return optimizer

    def _module_of(self, optimizer: Optimizer) -> nn.Module:
        held = {p for group in optimizer.param_groups for p in group["params"]}
        found = (m for m in self._modules if held <= set(m.parameters()))
        return next(found, nn.ModuleList(self._modules))

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, and shard again what was gathered before it, say to validate.

        Raises:
            RuntimeError: A gradient is still that of each rank.
        """
        refuse_unreduced(self._modules, optimizer)
        for module in self._modules:
            shard_again(module)
        return super().optimizer_step(optimizer, **kwargs)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale all gradients down to a norm, that of the whole parameters; return it."""
        refuse_unreduced(self._modules, optimizer)
        self.precision.unscale_gradients(optimizer)
        found: Any = self.precision.main_params(optimizer)
        return clip_grad_norm_(found, max_norm, norm_type, error_if_nonfinite)

    @override
    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        """Limit each element of the gradients."""
        refuse_unreduced(self._modules, optimizer)
        self.precision.unscale_gradients(optimizer)
        found: Any = self.precision.main_params(optimizer)
        clip_grad_value_(found, clip_val)

    # Batches.

    @override
    def process_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of this rank's samples, whose batches are split over the domain."""
        wanted, self._samplers_wanted = self._samplers_wanted, False
        loader = copy.copy(dataloader)
        read_in_order(loader)
        sampler = own_sampler(loader)
        replica = self.processes.replica(self.global_rank)
        count_replicas_in(loader, self.replicas, replica)
        whole = isinstance(sampler, DistributedSampler) or isinstance(
            loader.dataset, IterableDataset
        )
        if self.replicas > 1 and wanted and not whole:
            alike, drops = Alike(sampler, self.broadcast), drops_last(loader)
            if len(alike) % self.replicas and not drops:
                rank_zero_warn(
                    f"{len(alike)} samples are read on {self.replicas} data replicas, so in each "
                    "epoch some are read twice; DataLoader(..., drop_last=True) leaves out what "
                    "fills no batch."
                )
            part = Stride(alike, self.replicas, replica, whole_batches=drops)
            loader = with_sampler(loader, part)
        seed: Any = loader.worker_init_fn
        if isinstance(seed, partial) and seed.func is pl_worker_init_function:
            loader.worker_init_fn = partial(seed.func, rank=replica)
        if self.world_size == 1:
            return loader
        return through(loader, lambda begin: self._same.batches(self._batches(loader, begin)))

    def _batches(
        self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]
    ) -> Generator[Any]:
        share_random_state(self.domain_mesh, self.root_device)
        for number, batch in enumerate(compared_at_end(begin())):
            if number == 0:
                refuse_unread(own_batches(loader))
            yield self._part_of(batch, first=number == 0)

    def _part_of(self, batch: Any, *, first: bool) -> Any:
        if self.domain_size == 1:
            return batch
        self._same.note_batch(batch)
        if first:
            check_same_batch(batch, self.domain_mesh)
        batch = move_data_to_device(batch, self.root_device)
        batch = shard_batch(batch, self.domain_mesh, self.shard_dims)
        if first:
            self.announced.say(split_summary(batch), None, self.domain_size)
        self._count_metrics()
        return batch

    # Collectives.

    @override
    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks, in place; "sum" counts the ranks that share samples once."""
        if not isinstance(tensor, Tensor):
            return tensor
        group = None if group is dist.group.WORLD else group
        reduced = self.peers.reduce(
            tensor.detach(), self.root_device, group=group, reduce_op=reduce_op,
            copies=self.domain_size,
        )  # fmt: skip
        with torch.no_grad():  # autograd tells if it needs the value that was there
            return tensor.copy_(reduced)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather one entry per data replica, along a new first dim; of one replica as it is."""
        gathered = super().all_gather(tensor, group, sync_grads)
        every = group in (None, dist.group.WORLD)
        return gathered[0] if every and self.replicas == 1 else gathered

    # Checkpoints.

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole weights, on the first rank."""
        module = entered(module)
        shard_again(module)
        return self.saver.gather_module(module)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state, on the first rank."""
        return self.saver.gather_optimizer(optimizer, self._module_of(optimizer))

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write the file that Fabric writes in one process; any mesh loads it."""
        path, first = self.broadcast(path), self.is_global_zero
        whole = full(self._convert_stateful_objects_in_state(state, filter or {}), keep=first)
        together(lambda: first and self.checkpoint_io.save_checkpoint(whole, path, storage_options))

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Load each rank's part of whole weights."""
        module = entered(module)
        shard_again(module)
        load_module_state(module, state_dict, strict)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Any | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load whole states into this rank's parts; return what was not asked for."""
        path = self.broadcast(path)
        if isinstance(state, Optimizer):
            loaded = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            load_optimizer_state(state, loaded, self._module_of(state))
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only)
        held: dict[str, Any] = {
            key: Shards(value, self._module_of(value)) if isinstance(value, Optimizer) else value
            for key, value in state.items()
        }
        rest = super().load_checkpoint(path, held, strict, weights_only)
        state.update({k: v for k, v in held.items() if not isinstance(v, Shards)})
        return rest


class _NoSync(BackwardSyncControl):
    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_sync(entered(module)) if enabled else nullcontext()


register(STRATEGY_REGISTRY, FabricShardStrategy, FabricShardStrategy.strategy_name)
