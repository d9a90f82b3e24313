"""HybridShardStrategy: FSDP2 and domain decomposition behind `Trainer(strategy=...)`.

Every method that Lightning calls is on this page, or on those of its mixins: on_mesh.py has the
options, and checkpoints.py has what is saved and read. The work is done by parts: `ProcessMesh`,
`Peers`, `LoggedValues`, `SampleOrder`, `UnevenEvaluation`, `Saver` and `Steps`.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard.data.same_batch import check_same_after_hooks, check_same_batch
from lightning_shard.data.split import shard_batch
from lightning_shard.fsdp.choose_sharding import choose_sharding
from lightning_shard.fsdp.materialize import is_deferred
from lightning_shard.fsdp.plain_gradients import leave_plain_gradients
from lightning_shard.lightning import (
    LightningModule,
    ParallelStrategy,
    Precision,
    StrategyRegistry,
    Trainer,
    TrainerFn,
    TrainerStatus,
    mixture,
    optimizers_to_device,
    package,
    rank_zero_info,
)
from lightning_shard.ops.elementwise.random import use_exact_random
from lightning_shard.processes.mesh import share_mesh
from lightning_shard.processes.replica_world import count_replicas
from lightning_shard.trainer import process_mesh
from lightning_shard.trainer import sharding as parameters
from lightning_shard.trainer.between_batches import end_between_batches
from lightning_shard.trainer.callbacks.repeat_samples import repeats_samples
from lightning_shard.trainer.checkpoints import Checkpoints
from lightning_shard.trainer.counted_devices import count_devices_by_replica
from lightning_shard.trainer.explain import explain
from lightning_shard.trainer.hook_values import HookValues, give_whole_to
from lightning_shard.trainer.host import (
    load_late_states,
    log_on,
    tell_device,
    tell_mesh,
    trainer_of,
)
from lightning_shard.trainer.interrupted_save import say_what_was_not_saved
from lightning_shard.trainer.logged_values import LoggedValues
from lightning_shard.trainer.metrics_once import count_domains_once
from lightning_shard.trainer.on_mesh import ShardStrategy, register
from lightning_shard.trainer.ordered_batches import unfinished
from lightning_shard.trainer.parameter_counts import count_pairs_once
from lightning_shard.trainer.precision import clip_over_shards, refuse_to_drop_imaginary_parts
from lightning_shard.trainer.resumed_callbacks import end_as_saved, train_as_saved
from lightning_shard.trainer.resumed_loops import end_saved_step
from lightning_shard.trainer.sample_order import SampleOrder
from lightning_shard.trainer.split_summary import split_summary
from lightning_shard.trainer.steps import accumulating, use_no_grad
from lightning_shard.trainer.streams import count_as_the_longest, end_together
from lightning_shard.trainer.uneven_evaluation import UnevenEvaluation
from lightning_shard.trainer.xpu.accelerator import tell_of_unused_devices


class HybridShardStrategy(ShardStrategy, Checkpoints, ParallelStrategy):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride] - ShardStrategy comes first
    """Shards parameters over all processes and splits the fields of each sample over some of them.

    The processes form a mesh of data replicas x domain ranks. Data replicas read different samples;
    the ranks of a domain read the same samples and keep a part of each. The LightningModule is not
    changed and sees tensors of the global shape; its losses, gradients and buffers equal those of
    one process.
    """

    _precision = None  # Fabric looks whether a strategy brings its precision

    @override
    def _complete(self) -> None:
        """Make the parts that follow the loops of a Trainer."""
        self.logged = LoggedValues(self.peers, self.steps.same)
        self.samples = SampleOrder()
        self.evaluation = UnevenEvaluation(self.logged, self.steps)
        self.num_nodes = 1
        self.config: Mapping[str, str] = {}  # the command line's, alike on all ranks
        self._while_set_up = ExitStack()
        self._deferred = self._resumes = False  # began without memory, with a checkpoint
        self._last_checked: Any = None
        self._take_signals: Callable[[], None] = lambda: None
        self.hook_values: HookValues | None = None  # those of the newest stage on several ranks

    @property
    def is_distributed(self) -> bool:
        """Return True; Lightning reads it before it injects a sampler."""
        return True

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of data replicas and the place of this rank among them."""
        return {
            "num_replicas": self.replicas,
            "rank": self.processes.replica(self.global_rank),
        }

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None, "Lightning connects the module first"
        return self.lightning_module

    def _is_interrupted(self) -> bool:
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    # The Trainer assigns its plug-ins, and reads back what it then works with.

    def __repr__(self) -> str:
        """Tell a Trainer that does not take this object, which words it so, what would be taken."""
        return (
            f"<{type(self).__name__} for the Trainer; Fabric takes FabricShardStrategy; and where "
            f"this is not of {package()}: {mixture()}>"
        )

    @property
    @override
    def precision_plugin(self) -> Precision:
        """The plug-in for the precision, set by the Trainer."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Take the plug-in, and let it clip gradients over all shards."""
        self._precision_plugin = precision_plugin
        if precision_plugin is not None:
            clip_over_shards(precision_plugin, lambda o: self.steps.take_assigned(o))

    @override
    def _configure_launcher(self) -> None:
        if self.processes.fits_itself:  # an elastic launcher may have started fewer nodes
            self.num_nodes = process_mesh.started_nodes(
                self.cluster_environment, per_node=self.num_processes, nodes=self.num_nodes
            )
        self._launcher = process_mesh.launcher_of(
            self, self.cluster_environment, per_node=self.num_processes, nodes=self.num_nodes
        )

    # A stage of the Trainer begins.

    @override
    def setup_environment(self) -> None:
        """Start the process group, compare the options of the ranks, and arrange the mesh."""
        super().setup_environment()
        tell_of_unused_devices(self.root_device)
        self._deferred = self._resumes = self._is_compared = False
        self.saver.forget()
        self.join(self.precision_plugin)
        self.processes.compare("options", self._options_alike(), check=self.peers.check)
        mesh = self.processes.arrange(self.root_device, per_node=self.num_processes)
        trainer, replicas = self._module.trainer, self.processes.replicas()
        count_devices_by_replica()
        count_replicas(mesh, lambda: trainer.state.status is TrainerStatus.RUNNING)
        tell_mesh(self._module, mesh)
        self.samples.begin_stage(
            trainer,
            self.domain_mesh,
            replicas=self.replicas,
            replica=self.processes.replica(self.global_rank),
            device=self.root_device,
        )
        if self.world_size > 1:
            self.logged.follow(trainer, self.root_device, replicas)
            say_what_was_not_saved(trainer, self.peers, self.saver)
        ends = end_between_batches(trainer, self.peers, self.saver, self.cluster_environment)
        self._take_signals = ends.signals.take
        begins = ends.before_validation_batch, self.samples.numbers.agree
        self.evaluation.follow(trainer, self._module, self.root_device, replicas, begins=begins)
        end_saved_step(
            trainer,
            lambda: self.saver.logged(mesh) is not None,
            self.saver.unfinished,
            lambda step: self.saver.begin(("validation", step), self.root_device),
            lambda: end_as_saved(trainer, self._module),
        )

    def _options_alike(self) -> dict[str, str]:
        return {
            **self.config,
            **self.options_alike(self.precision_plugin),
            "RepeatSamples": str(repeats_samples(self._module.trainer)),
            **process_mesh.options_of_all_ranks(self._module.trainer),
            **self.saver.options(),
        }

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Make tensors on the meta device with `empty_init`; setup gives them memory."""
        if not empty_init:
            with super().tensor_init_context(empty_init):
                yield
        else:
            with torch.device("meta"), self.precision_plugin.tensor_init_context():
                yield

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True if the module has memory to load into only once it is sharded.

        Lightning asks before setup and after it, and must hear the same.
        """
        module = self.lightning_module
        self._deferred = self._deferred or (module is not None and is_deferred(module))
        return self._deferred

    @override
    def setup(self, trainer: Trainer) -> None:
        """Prepare plug-ins, parameters and optimizers in this order: each needs those before it."""
        self._resumes = trainer.ckpt_path is not None
        self._compare_resuming(False)
        self._set_up_plugins(trainer)
        self._shard_parameters(trainer)
        if self.domain_size > 1 or isinstance(self._module, FSDPModule):
            use_no_grad(trainer)
        self._share_among_ranks(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            count_pairs_once(trainer)
            self.steps.follow(self._module, self.optimizers)
        self.setup_precision_plugin()
        optimizers_to_device(self.optimizers, self.root_device)

    def _set_up_plugins(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        # over one replica's ranks or tiles BatchNorm has the statistics of the field, also on a CPU
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync and self.replicas > 1:
            self.model = self._layer_sync.apply(self._module)
        refuse_to_drop_imaginary_parts(self._module, self.precision_plugin)
        self.model = self.precision_plugin.convert_module(self._module)
        self.model_to_device()

    def _shard_parameters(self, trainer: Trainer) -> None:
        self._choose_sharding()
        files = self.first_weights if trainer.ckpt_path is None else None
        self.shard(self._module, parameters.copies(trainer, self._module), files, opens_steps=True)
        self.steps.prepare(self._module, self.sharding_options, self.device_mesh)

    def _choose_sharding(self) -> None:
        """Choose for "auto": as the run that is resumed did, else by the bytes of states."""
        if self.sharding_options.mode != "auto" or self.world_size == 1:
            return
        if (before := self.saver.sharding()) is not None:
            self.sharding_options = replace(self.sharding_options, mode=before)
            return
        self.sharding_options, sentence = choose_sharding(
            self.sharding_options, self._module, self.root_device, dist.group.WORLD
        )
        if sentence:
            rank_zero_info(sentence)

    def _share_among_ranks(self, trainer: Trainer) -> None:
        count_domains_once(trainer, self._module, self.data_group, self.domain_mesh)
        self.samples.share_numbers()
        self._while_set_up.close()
        if self.exact_random is not None:
            self._while_set_up.enter_context(use_exact_random(self.exact_random))
        if self.world_size > 1:
            self.hook_values = HookValues(self._module)
            self.hook_values.begin(self._while_set_up)
            give_whole_to(trainer.loggers)
        self.barrier("HybridShardStrategy.setup")

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, with the sharded parameters for those that moved."""
        super().setup_optimizers(trainer)
        parameters.mend_optimizers(self.optimizers, self._module, self._moved)
        if self.world_size > 1:
            alike = self.optimizers, self.lr_scheduler_configs
            self.processes.compare_optimizers(*alike, check=self.peers.check)
            self.logged.follow_schedulers(trainer)

    @override
    def model_to_device(self) -> None:
        """Move what has memory; parameters on the meta device get theirs when they are sharded."""
        parameters.to_device(self._module, self.root_device)
        tell_device(self._module, self.root_device)

    # Loops and steps.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Let a loader give this replica's samples, and end on all ranks together."""
        if not isinstance(dataloader, DataLoader):
            return dataloader
        late = self._resumes or self.restore_checkpoint_after_setup
        drawn = self.saver.order, self.saver.generator
        dataloader = self.samples.prepare(dataloader, *drawn, late=late)
        if self.world_size == 1:
            return dataloader
        if self._module.trainer.state.fn == TrainerFn.PREDICTING:
            count_as_the_longest(dataloader)
        elif self._module.trainer.training:
            end_together(dataloader, self.root_device)
        else:
            self.evaluation.prepare(dataloader)
        return dataloader

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch, and split it: its tensors are then this rank's parts."""
        if self.domain_size == 1:
            return super().batch_to_device(batch, device, dataloader_idx)
        trainer = self._module.trainer
        self.steps.same.note_batch(batch)
        read = (trainer.state.stage, trainer.current_epoch, dataloader_idx)
        is_first, self._last_checked = read != self._last_checked, read
        if is_first:
            check_same_batch(batch, self.domain_mesh)
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if is_first:
            check_same_after_hooks(batch, self.domain_mesh)
        batch = shard_batch(batch, self.domain_mesh, self.shard_dims)
        if is_first:
            self.announced.say(split_summary(batch), trainer.state.fn, self.domain_size)
        return batch

    @override
    def on_train_start(self) -> None:
        """Go on with the random numbers and logged values of the checkpoint that is resumed."""
        load_late_states(self._module.trainer)
        self.saver.continue_random_numbers(self.device_mesh, self.root_device)
        if (logged := self.saver.logged(self.device_mesh)) is not None:
            log_on(self._module.trainer, logged)
        train_as_saved(self._module.trainer, self._module, self.saver.frozen())

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note the random numbers: a resumed run repeats a step that an exception ends."""
        self.saver.begin(unfinished(self._module.trainer), self.root_device)
        self.steps.begin()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, which sees whole gradients."""
        with self.steps.one_step():
            return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute gradients, which all ranks average."""
        with self.steps.backward_of(closure_loss) as loss:
            return super().backward(loss, optimizer, *args, **kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Leave gradients unreduced while a batch is accumulated, where no hook reads them."""
        with accumulating(self._module, trainer_of(self.lightning_module)):
            yield

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, and shard again what it has gathered."""
        return self.steps.evaluate(self._module, super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, and shard again what it has gathered."""
        return self.steps.evaluate(self._module, super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; parameters are whole until the end."""
        with self.steps.same.one_step():
            return super().predict_step(*args, **kwargs)

    @override
    def on_predict_start(self) -> None:
        """Gather all parameters at once, since ranks may have other numbers of batches."""
        self.steps.keep_parameters_whole(self._module, True)

    @override
    def on_predict_end(self) -> None:
        """Shard the parameters again."""
        self.steps.keep_parameters_whole(self._module, False)

    # Collectives.

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; a rank that has failed ends the wait."""
        self._take_signals()  # Lightning has set its handlers before the loops begin
        self.samples.comes_to(name)
        self.logged.comes_to_in_hook(waits := "waits for all ranks at a barrier")
        with self.logged.exchanges(waits):
            super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src` on all ranks."""
        self.logged.comes_to_in_hook("broadcasts an object")
        return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks; "sum" counts those that share samples once."""
        if self.logged.reduces(tensor, reduce_op):
            return self.logged.reduce(tensor, group, reduce_op, self.domain_size)
        self.logged.comes_to_in_hook("calls reduce over all ranks", group)
        return self.peers.reduce(
            tensor, self.root_device, group=group, reduce_op=reduce_op, copies=self.domain_size
        )

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather one entry per data replica, along a new first dim."""
        self.logged.comes_to_in_hook("calls all_gather over all replicas", group)
        return super().all_gather(tensor, group, sync_grads)

    @override
    def _explain(self, error: BaseException) -> None:
        by_hand = not getattr(self.lightning_module, "automatic_optimization", True)
        explain(error, self.optimizers, by_hand=by_hand)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Add to the error what it means on split batches, and learn whether ranks are lost."""
        self._explain(exception)
        self.announced.explain(exception)
        self.peers.is_disconnected()

    @override
    def teardown(self) -> None:
        """End the stage; shards stay on the device, since their mesh is there."""
        self._while_set_up.close()
        share_mesh(None)
        self.logged.forget()
        self.samples.end_stage()
        self.saver.finish(together_with_all=not self.peers.is_disconnected())
        self.peers.pause_watch()
        module = self.lightning_module
        is_sharded = isinstance(module, FSDPModule)
        if module is not None and not is_sharded:  # shards stay as `parallelize` made them
            leave_plain_gradients(module)
        if not (is_sharded or (module and is_deferred(module))):
            super().teardown()
            return
        assert self.accelerator is not None
        self.cluster_environment.teardown()  # shards stay on the device of their mesh
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


register(StrategyRegistry, HybridShardStrategy, HybridShardStrategy.strategy_name)
