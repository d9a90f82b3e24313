"""HybridShardStrategy: FSDP2 and domain decomposition behind `Trainer(strategy=...)`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from typing_extensions import override

from lightning_shard.batch import ShardDims, check_same_batch, shard_batch, split_dims
from lightning_shard.counting import count_domains_once
from lightning_shard.first_weights import copy_shards, described, load_first_weights, to_device
from lightning_shard.loop_strategy import STEPS, LoopStrategy, copies
from lightning_shard.materialize import is_deferred
from lightning_shard.ops.random import use_exact_random
from lightning_shard.options import ShardingOptions, policy_of
from lightning_shard.parallelize import parallelize
from lightning_shard.plain_gradients import step_one_by_one_if_mixed
from lightning_shard.precision import refuse_to_drop_imaginary_parts
from lightning_shard.random_state import random_state, set_random_state


class HybridShardStrategy(LoopStrategy):
    """Shards parameters over all processes and splits the fields of each sample over some of them.

    The processes form a mesh of data replicas x domain ranks. Data replicas read different samples;
    the ranks of a domain read the same samples and keep a part of each. The LightningModule is not
    changed and sees tensors of the global shape; its losses, gradients and buffers equal those of
    one process.
    """

    strategy_name = "hybrid_shard"

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        domain_parallel_size: int | Sequence[int] = 1,
        shard_dims: int | Sequence[int] | dict[str, int | Sequence[int] | None] | None = None,
        exact_random: bool = False,
        sharding: Literal["full", "gradients", "none", "hybrid"] = "full",
        shard_size: int | None = None,
        wrap: Sequence[str] | Callable[[nn.Module], bool] | None = None,
        min_num_params: int | None = None,
        ignored_parameters: Sequence[str] = (),
        mp_policy: MixedPrecisionPolicy | dict[str, str | bool] | None = None,
        cpu_offload: bool = False,
        prefetch: int = 1,
        activation_checkpointing: bool | Sequence[str] = False,
        compile_blocks: bool = False,
        init_weights_from: str | dict[str, str] | None = None,
        timeout_s: float = 1800.0,
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        checkpoint_format: Literal["auto", "single", "sharded"] = "auto",
        async_checkpoint: bool = False,
    ) -> None:
        """Describe the mesh.

        Args:
            data_parallel_size: Number of data replicas; "auto": all processes divided by the
            domain.
            domain_parallel_size: Processes that share each sample: a number, or one for each split
            dim,
                such as `[2, 2]`.
            shard_dims: Tensor dims that the domain splits. By default the first spatial dims of
            every
                floating-point batch entry (B, C, *spatial). An int or a list: these dims instead. A
                dict: for each batch entry its dims; entries that are not named stay whole.
            exact_random: Whether dropout of split tensors draws the numbers of one process, at the
                cost of drawing those of the whole tensor on each rank.
            sharding: What each rank holds a part of. "full": parameters, gradients and optimizer
                state (ZeRO-3). "gradients": the same, but parameters stay whole from forward to
                backward (ZeRO-2). "none": nothing; gradients are averaged (DDP). "hybrid": as
                "full" within a group of processes, and a copy in each group (HSDP).
            shard_size: For "hybrid", the processes that share one set of parameters, domain ranks
                included; by default those of a node.
            wrap: Classes of blocks, such as `["T5Block"]`, or a function that says whether a module
                is one: the parameters of a block are gathered when it runs. By default the
                repeated parts of the network.
            min_num_params: Instead of `wrap`, the number of parameters from which on a module is a
                block.
            ignored_parameters: Patterns of names, such as `["*.norm.weight"]`, of parameters that
                every process keeps whole; their gradients are averaged.
            mp_policy: Dtypes of gathered parameters (param_dtype), of the gradients' reduction
                (reduce_dtype) and of outputs (output_dtype), beside the Trainer's precision.
            cpu_offload: Whether shards, gradients and optimizer states stay in CPU memory.
            prefetch: How many blocks are gathered ahead of the one that computes.
            activation_checkpointing: Classes whose activations are computed again in backward
                instead of kept; true: those of the blocks.
            compile_blocks: Whether torch.compile compiles each block.
            init_weights_from: A file of weights to begin with (safetensors, or of torch.save), read
                shard by shard; or one for each submodule: `{"network": "t5/model.safetensors"}`.
            timeout_s: Seconds after which a collective that does not end fails.
            process_group_backend: By default the device's: nccl, xccl or gloo.
            accelerator: Set by the Trainer.
            parallel_devices: Set by the Trainer.
            cluster_environment: Set by the Trainer.
            checkpoint_io: How files are written; by default Lightning's.
            precision_plugin: Set by the Trainer.
            checkpoint_format: "single": Lightning's file, whole. "sharded": a directory, to which
                each process writes its part. "auto": a file up to 16 GiB of weights and optimizer
                state, then a directory.
            async_checkpoint: Whether training goes on while a directory is written.

        Raises:
            ValueError: A size is smaller than 1, or two arguments exclude each other.
        """
        if shard_size is not None and sharding != "hybrid":
            raise ValueError(
                f"shard_size {shard_size} needs sharding 'hybrid'; got sharding {sharding!r}."
            )
        super().__init__(
            data_parallel_size,
            domain_parallel_size,
            timeout_s,
            process_group_backend,
            (shard_size or "node") if sharding == "hybrid" else None,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.set_checkpoint_options(checkpoint_format, async_checkpoint)
        self.shard_dims: ShardDims = shard_dims
        self.exact_random = exact_random
        self.sharding_options = ShardingOptions(
            sharding=sharding,
            wrap=wrap,
            min_num_params=min_num_params,
            ignored_parameters=ignored_parameters,
            mp_policy=policy_of(mp_policy),
            cpu_offload=cpu_offload,
            prefetch=prefetch,
            activation_checkpointing=activation_checkpointing,
            compile_blocks=compile_blocks,
        )
        self.offloads = cpu_offload
        self.init_weights_from = (
            {"": init_weights_from} if isinstance(init_weights_from, str) else init_weights_from
        ) or {}
        self._moved: dict[Any, Any] = {}
        self._last_checked: Any = None

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # FSDP2 trains no parameter that was first seen in it
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.lightning_module)
        refuse_to_drop_imaginary_parts(self.lightning_module, self.precision_plugin)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        assert self.device_mesh is not None
        self.compare("module", described(self.lightning_module))
        copied = list(copies(trainer, self.lightning_module))
        how: Any = {"dims": split_dims(self.shard_dims), "options": self.sharding_options}
        self._moved |= parallelize(
            self.lightning_module,
            self.device_mesh,
            **how,
            methods=STEPS,
            loaded=tuple(self.init_weights_from) if trainer.ckpt_path is None else ("",),
        )
        if trainer.ckpt_path is None:
            load_first_weights(self.lightning_module, self.init_weights_from)
        for module in copied:
            older = is_deferred(module) or self.init_weights_from
            module = to_device(module, self.root_device)
            parallelize(module, self.device_mesh, **how, loaded=("",))
            if older and trainer.ckpt_path is None:
                copy_shards(self.lightning_module, module)
        replicas = self.distributed_sampler_kwargs["num_replicas"]
        count_domains_once(trainer, self.lightning_module, self.data_group, replicas)
        self._share_random_state()
        use_exact_random(self.exact_random)
        self.barrier("HybridShardStrategy.setup")
        if fitting:
            self.setup_optimizers(trainer)
            self.follow_manual_optimization()
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def options_alike(self) -> dict[str, str]:
        return {
            **super().options_alike(),
            "shard_dims": str(self.shard_dims),
            "exact_random": str(self.exact_random),
            "checkpoint_format": self.checkpoint_format,
            "async_checkpoint": str(self.async_checkpoint),
            **self.sharding_options.described(),
        }

    def _share_random_state(self) -> None:
        """The ranks of a domain draw the same random numbers for what they all compute."""
        if self.domain_size > 1:
            device = self.root_device
            states = [random_state(device)]
            for axis in reversed(range(self.domain_mesh.ndim)):
                group = self.domain_mesh.get_group(axis)
                dist.broadcast_object_list(states, group=group, group_src=0, device=device)
            set_random_state(states[0], device)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        mine = set(self.lightning_module.parameters())
        for group in itertools.chain.from_iterable(o.param_groups for o in self.optimizers):
            group["params"] = [p if p in mine else self._moved.get(p, p) for p in group["params"]]
            if any(p not in mine for p in group["params"]):
                raise RuntimeError(
                    "an optimizer holds parameters that are not the module's, so it would train "
                    "nothing; create it in configure_optimizers from self.parameters()."
                )
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(step_one_by_one_if_mixed)

    @override
    def model_to_device(self) -> None:
        module, device = self.lightning_module, self.root_device
        assert module is not None
        if not isinstance(module, FSDPModule):  # shards stay where they are
            to_device(module, device)
        module._device = device

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if self.domain_size == 1:
            return super().batch_to_device(batch, device, dataloader_idx)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        read = (trainer.state.stage, trainer.current_epoch, dataloader_idx)
        if read != self._last_checked:  # the first batch of each epoch
            self._last_checked = read
            check_same_batch(batch, self.domain_mesh)
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return shard_batch(batch, self.domain_mesh, self.shard_dims)

    @override
    def teardown(self) -> None:
        self.finish_saving()
        if self._failure is not None:
            self._failure.close()
            self._failure = None
        module = self.lightning_module
        if not (isinstance(module, FSDPModule) or (module and is_deferred(module))):
            super().teardown()
            return
        assert self.cluster_environment is not None
        assert self.accelerator is not None
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
