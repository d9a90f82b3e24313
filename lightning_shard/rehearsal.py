"""One training step of a module on a few processes of this machine, and what it showed.

The batch, the weights and the random numbers are the same in every rehearsal, so that what
differs between one process and several is the work of this package.
"""

import contextlib
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_shard.batch import ShardDims
from lightning_shard.checkpoint import full_module_state
from lightning_shard.escape import allow_gather
from lightning_shard.launch import launch
from lightning_shard.ops import UnsupportedOperationError
from lightning_shard.stored import bytes_of
from lightning_shard.strategy import HybridShardStrategy
from lightning_shard.tensor import DomainTensor
from lightning_shard.traffic import counted
from lightning_shard.wrap import blocks

Data = LightningDataModule | DataLoader

_GATHERED = re.compile("(.*) has no rule for split tensors; it runs on gathered ones")


@dataclass
class Rehearsal:
    """What one training step gave.

    Attributes:
        loss: Of the step; None if it was refused.
        gradients: Of each parameter, whole, and each buffer after the step.
        gathered: Functions without a rule for split tensors, which ran on gathered ones.
        refused: The sentence with which the step stopped, if it did.
        parameters: Bytes of all parameters.
        block: Bytes of the parameters of the largest block, which are gathered at once.
        optimizer: Bytes of the optimizer's states of all parameters.
        activations: Bytes that this rank keeps from forward for backward.
        batch: Bytes of the batch that this rank holds.
        sent: Bytes that this rank sent.
    """

    loss: float | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    gathered: list[str] = field(default_factory=list)
    refused: str = ""
    parameters: int = 0
    block: int = 0
    optimizer: int = 0
    activations: int = 0
    batch: int = 0
    sent: int = 0


def rehearse(
    module: LightningModule,
    data: Data,
    domain: Sequence[int],
    shard_dims: ShardDims = None,
    **trainer: Any,
) -> list[Rehearsal]:
    """One training step on the CPU, on as many processes as the domain has ranks.

    Args:
        module: What is trained; it stays as it is, the processes have copies.
        data: Whose first training batch is used.
        domain: Ranks along each split dim; `()` for Lightning's own strategy in one process.
        shard_dims: As of `HybridShardStrategy`.
        trainer: Arguments of the Trainer, such as its precision.

    Returns:
        What each rank saw; whole gradients are with the first.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own, batch = _first_batch(data)
    task = (module, own, batch, tuple(domain), shard_dims, trainer)
    return launch(_step, *task, processes=math.prod(domain))


def _first_batch(data: Data) -> tuple[LightningDataModule | None, Any]:
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
    loader = data.train_dataloader() if isinstance(data, LightningDataModule) else data
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"one DataLoader of training batches is needed; got {type(loader).__name__}. Give one "
            "that yields what training_step takes."
        )
    return (data if isinstance(data, LightningDataModule) else None), next(iter(loader))


def _step(
    module: LightningModule,
    data: LightningDataModule | None,
    batch: Any,
    domain: tuple[int, ...],
    shard_dims: ShardDims,
    options: dict[str, Any],
) -> Rehearsal:
    seed_everything(0, verbose=False)  # ours begins again with this seed once ranks have met
    watch, strategy = _Watch(), "auto"
    if domain:
        dims: Any = shard_dims
        strategy = HybridShardStrategy(
            domain_parallel_size=domain, shard_dims=dims, exact_random=True
        )
    with warnings.catch_warnings(record=True) as noted, _quiet(), allow_gather():
        warnings.simplefilter("always")
        trainer = Trainer(
            **{"accelerator": "cpu", "devices": dist.get_world_size(), "max_steps": 1, **options},
            strategy=strategy,
            callbacks=[watch],
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        with counted() as traffic:
            try:
                trainer.fit(module, **_feed(data, batch))
            except UnsupportedOperationError as error:
                watch.seen.refused = str(error)
        watch.seen.sent = traffic.bytes
    found = (_GATHERED.match(str(warning.message)) for warning in noted)
    watch.seen.gathered = list(dict.fromkeys(match[1] for match in found if match))
    if dist.get_rank():
        watch.seen.gradients = {}
    return watch.seen


def _feed(data: LightningDataModule | None, batch: Any) -> dict[str, Any]:
    """What makes `fit` train on one batch; a module may ask its data module for more."""
    batches: Any = [batch]
    loader = DataLoader(batches, batch_size=None)
    if data is None:
        return {"train_dataloaders": loader}
    data.train_dataloader = lambda: loader
    return {"datamodule": data}


class _Watch(Callback):
    """Looks at the first step."""

    def __init__(self) -> None:
        self.seen = Rehearsal()
        self._kept: dict[int, int] = {}
        self._hooks = contextlib.ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the sizes of parameters."""
        sizes = {p: p.nbytes for p in pl_module.parameters()}
        self.seen.parameters = sum(sizes.values())
        for block in (*blocks(pl_module), pl_module):  # inner ones first
            own = [sizes.pop(p) for p in block.parameters() if p in sizes]
            self.seen.block = max(self.seen.block, sum(own))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to note what autograd keeps."""
        tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
        parts = [x.to_local() if isinstance(x, DomainTensor) else x for x in tensors]
        self.seen.batch = sum(x.nbytes for x in parts)
        known = {_memory(x) for x in (*parts, *pl_module.parameters()) if type(x) is not DTensor}

        def keep(x: Tensor) -> Tensor:
            is_parameter = x.requires_grad and x.grad_fn is None  # gathered, it has new memory
            if _memory(x) not in known and not is_parameter:
                self._kept[_memory(x)] = x.untyped_storage().nbytes()
            return x

        self._hooks.enter_context(saved_tensors_hooks(keep, lambda x: x))

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """End with that."""
        self._hooks.close()
        self.seen.activations = sum(self._kept.values())

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Read the gradients as a state, whose names and layout are those of the plain module."""
        if self.seen.gradients:
            return
        with torch.no_grad():
            for p in pl_module.parameters():
                p.zero_() if p.grad is None else p.copy_(p.grad)
        state = full_module_state(pl_module)
        self.seen.gradients = {k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Note the loss and the size of the optimizer's states."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.seen.loss = math.nan if loss is None else float(loss)
        self.seen.optimizer = bytes_of([dict(o.state) for o in trainer.optimizers])


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Trainers say of themselves."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
