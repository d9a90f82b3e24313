"""Two callbacks measure the first training step, and keep what evaluation gives."""

import contextlib
import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.checkpoint.stored import bytes_of
from lightning_shard.data.tree import leaves_of
from lightning_shard.fsdp.blocks import blocks
from lightning_shard.lab.seen import Rehearsal
from lightning_shard.processes.narrow import is_mapping
from lightning_shard.processes.torch_private.internals import (
    base_of,
    keystr,
    tree_flatten_with_path,
)
from lightning_shard.tensor.placement import gather
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer.split_summary import split_summary


class Watch(Callback):
    """Notes in `seen` what the first training step holds and gives."""

    def __init__(self, seen: Rehearsal) -> None:
        """Choose where to note it."""
        self.seen = seen
        self._kept: dict[int, int] = {}
        self._hooks = contextlib.ExitStack()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the sizes of parameters."""
        sizes = {p: p.nbytes for p in pl_module.parameters()}
        self.seen.parameters = sum(sizes.values())
        for block in (*blocks(pl_module), pl_module):  # inner ones first
            own = [sizes.pop(p) for p in block.parameters() if p in sizes]
            self.seen.block = max(self.seen.block, sum(own))

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to note what autograd keeps."""
        self.seen.split = split_summary(batch)
        tensors = [x for x in leaves_of(batch) if isinstance(x, Tensor)]
        parts = [x.to_local() if isinstance(x, DomainTensor) else x for x in tensors]
        self.seen.batch = sum(x.nbytes for x in parts)
        known = {_memory(x) for x in (*parts, *pl_module.parameters()) if type(x) is not DTensor}

        def keep(x: Tensor) -> Tensor:
            if _memory(x) not in known and not _is_parameter(x):
                self._kept[_memory(x)] = x.untyped_storage().nbytes()
            return x

        self._hooks.enter_context(saved_tensors_hooks(keep, lambda x: x))

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """End with that."""
        self._hooks.close()
        self.seen.activations = sum(self._kept.values())

    @override
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

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Note the loss and the size of the optimizer's states."""
        loss: Any = outputs.get("loss") if is_mapping(outputs) else outputs
        self.seen.loss = math.nan if loss is None else float(loss)
        self.seen.optimizer = bytes_of([dict(o.state) for o in trainer.optimizers])


class Keep(Callback):
    """Keeps in `seen` what an evaluation step returns for each loader, whole."""

    def __init__(self, seen: Rehearsal) -> None:
        """Choose where to keep it."""
        self.seen = seen

    def _keep(self, outputs: Any, dataloader_idx: int) -> None:
        """Gather the leaves of what a step returned; all ranks must come here."""
        for path, leaf in tree_flatten_with_path(outputs)[0]:
            name = f"output{f' of loader {dataloader_idx}' if dataloader_idx else ''}{keystr(path)}"
            if isinstance(leaf, Tensor):
                self.seen.values[name] = gather(leaf).detach().cpu().clone()
            elif isinstance(leaf, bool | int | float | str):
                self.seen.values[name] = leaf

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep what validation_step returned."""
        self.seen.split = split_summary(batch)
        self._keep(outputs, dataloader_idx)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_parameter(x: Tensor) -> bool:
    """Whether `x` is a parameter, or a view of one: gathered, it has new memory."""
    source = base_of(x)
    return source.requires_grad and source.grad_fn is None
