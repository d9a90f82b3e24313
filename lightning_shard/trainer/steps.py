"""Works around the steps of Lightning's loops: the mean of gradients, and FSDP2's shards."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_shard.domain.subdomain import domain_of
from lightning_shard.fsdp.no_sync import no_sync
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.fsdp.plain_gradients import PlainGradients, plain_gradients_of
from lightning_shard.fsdp.same_blocks import members_come_to
from lightning_shard.fsdp.shard_block import sharded_modules
from lightning_shard.fsdp.unused_parameters import UnusedParameters, unused_parameters_of
from lightning_shard.lightning import LightningModule, Trainer, is_overridden, rank_zero_info
from lightning_shard.ops.elementwise.whole_gradients import whole_gradients
from lightning_shard.processes.mesh import domain_mesh
from lightning_shard.trainer.host import callbacks_of
from lightning_shard.trainer.manual_backward import ManualBackward
from lightning_shard.trainer.same_steps import SameSteps


def use_no_grad(trainer: Trainer) -> None:
    """Evaluate under no_grad, with shards and with split fields.

    FSDP2 trains no parameter that was first seen in inference mode, and rules keep tables that they
    have made once. Lightning makes the same exception for its own FSDP strategy and for gloo.
    """
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    if any(loop.inference_mode for loop in loops) and dist.get_backend() != "gloo":
        rank_zero_info(
            "validation, test and prediction run under torch.no_grad() instead of inference mode, "
            "after which shards and split fields could not be trained."
        )
    for loop in loops:
        loop.inference_mode = False


def accumulating(module: nn.Module, trainer: Trainer | None) -> AbstractContextManager[None]:
    """Leave gradients unreduced inside, unless a hook reads them after each backward pass."""
    owners = [] if trainer is None else [trainer.lightning_module, *callbacks_of(trainer)]
    is_read = any(is_overridden("on_after_backward", owner) for owner in owners)
    return nullcontext() if is_read else no_sync(module)


class Steps:
    """Runs steps: with whole parameters, whose gradients are averaged, or with shards.

    Attributes:
        plain: The mean of gradients of whole parameters; None where all are sharded.
        same: Compares what the ranks of a domain compute in their steps.
    """

    def __init__(self) -> None:
        """Begin without a module."""
        self.plain: PlainGradients | None = None
        self._shards: UnusedParameters | None = None
        self._whole_until_backward = False
        self._manual: ManualBackward | None = None
        self._mesh: DeviceMesh | None = None
        self.same = SameSteps()

    def prepare(self, module: LightningModule, options: ShardingOptions, mesh: DeviceMesh) -> None:
        """Begin a stage with a module that `parallelize` has prepared.

        Args:
            module: The module.
            options: Its options; in mode "gradients" blocks keep whole parameters until backward.
            mesh: The mesh of all processes.
        """
        self.plain, self._shards = plain_gradients_of(module), unused_parameters_of(module)
        self._whole_until_backward = options.mode == "gradients"
        self._mesh = mesh if options.mode == "none" and mesh.size() > 1 else None
        self._manual = None
        domain = domain_mesh(mesh)
        self.same.begin([] if domain is None else domain_of(domain).ranks)

    def follow(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Prepare what steps the optimizers, once they hold the module's parameters."""
        if self._mesh is not None:
            step_by_mean_loss(optimizers)
        if module.automatic_optimization:
            return
        if isinstance(module, FSDPModule):
            self._manual = ManualBackward(module, optimizers, stay_whole=self._whole_until_backward)
        elif self.plain is not None:
            self.plain.watches_assigned = True
            for optimizer in optimizers:
                optimizer.register_step_pre_hook(self._take_assigned_of)

    def begin(self) -> None:
        """Prepare for a training step, after all hooks that come before it."""
        if self._manual is not None:
            self._manual.begin_step()
        if self.plain is not None:
            self.plain.take_new()

    @contextmanager
    def one_step(self) -> Generator[None]:
        """Let a step see whole gradients, and count what it calls.

        Of a sharded module `parallelize` has done so inside of its steps, and hooks after one see
        gradients as it has left them.
        """
        if self._mesh is None:
            with self.same.one_step():
                yield
            if self._manual is not None:
                self._manual.end_step()
            return
        gradients = whole_gradients(domain_mesh(self._mesh), comes_to=members_come_to)
        with gradients, self.same.one_step():
            yield

    def evaluate(
        self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a step that has no backward pass, and shard again what it has gathered."""
        with self.one_step():
            output = step(*args, **kwargs)
        self.reshard(module)
        return output

    @contextmanager
    def backward_of(self, loss: Tensor) -> Generator[Tensor]:
        """Yield the tensor from which the backward pass of `loss` must start."""
        with self.same.one_backward(loss), ExitStack() as around:
            for each in (self.plain, self._shards):  # shards are compared first
                if each is not None:
                    around.enter_context(each.one_backward())
            yield loss if self._manual is None else around.enter_context(self._manual.of(loss))

    def take_assigned(self, optimizer: Optimizer) -> None:
        """Give shards the gradients that a step of manual optimization has assigned itself."""
        if self._manual is not None:
            self._manual.take_assigned(optimizer)

    def _take_assigned_of(self, optimizer: Optimizer, *_: Any) -> None:
        if self.plain is not None:
            self.plain.average_assigned(p for g in optimizer.param_groups for p in g["params"])

    def reshard(self, module: nn.Module) -> None:
        """Shard again after a forward without backward: callbacks know sharded parameters."""
        for part in sharded_modules(module):
            part.reshard()

    def keep_parameters_whole(self, module: nn.Module, keep: bool) -> None:
        """Begin or end a stage in which no collective of FSDP2 may depend on the batch.

        Ranks have prediction sets of different lengths, so parameters are gathered before the
        first batch.
        """
        kept = keep or self._whole_until_backward
        for part in sharded_modules(module):  # the root is needed first in backward
            part.set_reshard_after_forward(not (kept or part is module), recurse=False)
            (part.unshard if keep else part.reshard)()


def step_by_mean_loss(optimizers: Sequence[Optimizer]) -> None:
    """Give LBFGS the mean loss of all ranks: by the loss of its rank, each would step elsewhere."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.register_step_pre_hook(_with_mean_loss)


def _with_mean_loss(_: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    closure = kwargs.get("closure")
    if closure is None:
        return None

    def mean() -> Any:
        loss = closure()
        if not isinstance(loss, Tensor):
            return loss
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    return args, {**kwargs, "closure": mean}
