"""What a strategy does around the steps of Lightning's loops, so that FSDP2 fits in with them."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard.checkpoint_strategy import CheckpointStrategy
from lightning_shard.manual import ManualBackward
from lightning_shard.mixins import sharded_modules
from lightning_shard.options import ShardingOptions
from lightning_shard.plain_gradients import no_sync
from lightning_shard.resumable import make_resumable
from lightning_shard.sanity_check import IsolatedSanityCheck
from lightning_shard.streams import end_alone, end_together

# predict_step runs with whole parameters, see on_predict_start
STEPS = ("training_step", "validation_step", "test_step")


class LoopStrategy(IsolatedSanityCheck, CheckpointStrategy):
    """Accumulation, manual optimization, evaluation and prediction with sharded parameters."""

    sharding_options: ShardingOptions
    _manual: ManualBackward | None = None

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._manual is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        with self._manual.of(closure_loss) as loss:
            return super().backward(loss, optimizer, *args, **kwargs)

    def follow_manual_optimization(self) -> None:
        """Once the optimizers hold the module's parameters."""
        module = self.lightning_module
        self._manual = None
        if isinstance(module, FSDPModule) and not module.automatic_optimization:
            self._manual = ManualBackward(module, self.optimizers)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().validation_step(*args, **kwargs)
        self._reshard()
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().test_step(*args, **kwargs)
        self._reshard()
        return output

    def _reshard(self) -> None:
        """After a forward without backward, so that callbacks find the parameters they know."""
        assert self.lightning_module is not None
        for module in sharded_modules(self.lightning_module):
            module.reshard()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers by data replica: the ranks of a domain must augment a sample alike."""
        if isinstance(dataloader, DataLoader):
            if dataloader.worker_init_fn is None:
                replica = self.distributed_sampler_kwargs["rank"]
                dataloader.worker_init_fn = partial(pl_worker_init_function, rank=replica)
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            if trainer.state.fn == TrainerFn.PREDICTING:
                end_alone(dataloader)
            else:
                make_resumable(dataloader, trainer)
                end_together(dataloader, self.root_device)
        return dataloader

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert self.lightning_module is not None
        with no_sync(self.lightning_module):
            yield

    @override
    def on_predict_start(self) -> None:
        """Prediction sets of uneven length: no collective of FSDP2 may depend on the batch."""
        self._keep_parameters_whole(True)

    @override
    def on_predict_end(self) -> None:
        self._keep_parameters_whole(False)

    def _keep_parameters_whole(self, keep: bool) -> None:
        assert self.lightning_module is not None
        root = self.lightning_module
        kept = keep or self.sharding_options.sharding == "gradients"
        for module in sharded_modules(root):  # the root is needed first in backward
            module.set_reshard_after_forward(not (kept or module is root), recurse=False)
            (module.unshard if keep else module.reshard)()


def copies(trainer: Trainer, module: LightningModule) -> Iterator[nn.Module]:
    """The copies of `module` that callbacks keep, such as averages of its weights."""
    plain = type(module)
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        for value in vars(callback).values():
            if isinstance(value, nn.Module) and value is not module:
                yield from (m for m in value.modules() if type(m) is plain and m is not module)
