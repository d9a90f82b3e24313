"""Works around the steps of Lightning's loops, so that FSDP2 fits in with them."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_shard.fsdp.shard_block import sharded_modules
from lightning_shard.trainer.manual_backward import ManualBackward


def use_no_grad(trainer: Trainer) -> None:
    """Evaluate under no_grad: FSDP2 trains no parameter that was first seen in inference mode.

    Lightning makes the same exception for its own FSDP strategy and for gloo.
    """
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    if any(loop.inference_mode for loop in loops) and dist.get_backend() != "gloo":
        rank_zero_info(
            "validation, test and prediction run under torch.no_grad() instead of inference mode, "
            "with which sharded parameters could not be trained afterwards."
        )
    for loop in loops:
        loop.inference_mode = False


class Steps:
    """Runs manual optimization, evaluation and prediction with sharded parameters."""

    def __init__(self, *, whole_until_backward: bool = False) -> None:
        """Begin without a module.

        Args:
            whole_until_backward: True if blocks keep their parameters whole after forward, as in
                sharding "gradients".
        """
        self._whole_until_backward = whole_until_backward
        self._manual: ManualBackward | None = None

    def follow(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Prepare for manual optimization, once the optimizers hold the module's parameters."""
        self._manual = None
        if isinstance(module, FSDPModule) and not module.automatic_optimization:
            self._manual = ManualBackward(module, optimizers)

    def begin(self) -> None:
        """Prepare for a training step, after all hooks that come before it."""
        if self._manual is not None:
            self._manual.begin_step()

    @contextmanager
    def backward_of(self, loss: Tensor) -> Generator[Tensor]:
        """Yield the tensor from which the backward pass of `loss` must start."""
        if self._manual is None:
            yield loss
        else:
            with self._manual.of(loss) as start:
                yield start

    def take_assigned(self) -> None:
        """Give shards the gradients that a step of manual optimization has assigned itself."""
        if self._manual is not None:
            self._manual.take_assigned()

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
