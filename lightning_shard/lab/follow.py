"""Follows a traced step: which part of it computes, and for which cause it holds memory."""

import gc
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.lab.timeline import Ledger
from lightning_shard.lightning import Callback, LightningModule, Trainer
from lightning_shard.processes.torch_private.internals import tree_leaves
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer.split_summary import SplitSummary, split_summary


def _update_by_lists(optimizers: Iterable[Optimizer]) -> None:
    """Let optimizers update all parameters at once, as torch does by default on a device.

    What they compute on the way is then as large as all parameters together.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True


class Follow(Callback):
    """Gives the ledger the part of the step that computes, and the causes of memory."""

    def __init__(self, ledger: Ledger, mode: Any) -> None:
        self.split, self.activations = SplitSummary(), 0
        self._ledger, self._mode = ledger, mode
        self._hooks = ExitStack()
        self._open: list[str] = []
        self._names: dict[nn.Module, str] = {}

    def __deepcopy__(self, memo: Any) -> "Follow":
        return self

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow modules and what they save."""
        self._names = {module: name for name, module in pl_module.named_modules()}
        self._mode.optimizers = trainer.optimizers
        if self._ledger.in_turns or self._ledger.is_of_gpu:
            _update_by_lists(trainer.optimizers)
        if self._ledger.in_turns:
            for p in pl_module.parameters():
                if p.requires_grad:
                    hook = p.register_post_accumulate_grad_hook(self._take_gradient)
                    self._hooks.callback(hook.remove)
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        self._hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        self._hooks.enter_context(saved_tensors_hooks(self._keep, lambda x: x))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._open.append(self._names.get(module, type(module).__name__))
        self._ledger.place = f"forward of {self._open[-1] or 'the module'}"

    def _leave(self, *_: Any) -> None:
        self._open.pop()

    def _take_gradient(self, p: Tensor) -> None:
        """Tiles add up one gradient of all."""
        self._ledger.hold(_locals([p.grad]), "gradients")

    def _keep(self, x: Tensor) -> Tensor:
        self._ledger.hold(_locals([x]), "activations")
        return x

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step with what it holds."""
        ledger, own = self._ledger, [*pl_module.parameters()]
        gc.collect(1)  # all objects that were made since the trace began
        self.split, self.activations = split_summary(batch), 0
        ledger.next_step()
        ledger.hold(_locals([*own, *pl_module.buffers()]), "parameters")
        ledger.hold(_locals([p.grad for p in own]), "gradients")
        states = tree_leaves([list(o.state.values()) for o in trainer.optimizers])
        ledger.hold(_locals(states), "optimizer")
        fields = _locals(tree_leaves(batch))
        ledger.hold(fields, "batch")
        ledger.receive(fields)
        self._mode.is_in_step = True

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """End forward."""
        self._mode.is_in_step = False
        self._ledger.place = "backward"
        self.activations = max(self.activations, self._ledger.held("activations"))

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on behind backward."""
        self._mode.is_in_step = True  # hooks may look at gradients, and a manual step goes on

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step."""
        self._mode.is_in_step = False

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Count gradients, which are all there now."""
        self._ledger.place = "the optimizer's step"
        self._ledger.hold(_locals([p.grad for p in pl_module.parameters()]), "gradients")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the hooks."""
        self.end()

    def end(self) -> None:
        """Remove the hooks, of which those of all modules would outlive the trace."""
        self._mode.is_in_step = False
        self._hooks.close()

    # one batch of another stage is a step
    on_validation_start = on_test_start = on_predict_start = on_train_start

    def _begin_other(self, *args: Any, **kwargs: Any) -> None:
        trainer, module, batch = args[:3]
        self.on_train_batch_start(trainer, module, batch, 0)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _begin_other
    on_validation_end = on_test_end = on_predict_end = on_train_end


def _locals(tensors: Iterable[Any]) -> list[Tensor]:
    with torch.no_grad():
        own: Any = [x for x in tensors if isinstance(x, Tensor)]
        return [x.to_local() if isinstance(x, DTensor | DomainTensor) else x for x in own]
