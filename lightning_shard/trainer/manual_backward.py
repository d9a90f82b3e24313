"""Allows several forward and backward passes inside one training step under FSDP2.

FSDP2 reduces gradients in a backward pass that began at the output of a forward it has hooks on,
and then gives up the whole parameters. Inside a training step of a user neither holds: the loss is
not an output yet, and the next pass reads parameters again, after an optimizer has changed them.
Nor does it follow `toggle_optimizer` once it has gathered the parameters.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.fsdp.shard_block import sharded_modules
from lightning_shard.fsdp.step_writes import GATHERED, GatheredParameters
from lightning_shard.fsdp.unused_parameters import unused_parameters_of
from lightning_shard.ops.elementwise.whole_gradients import are_alike, mark_of


class ManualBackward:
    """Makes the backward passes of one module; it is built before the module's first step."""

    def __init__(
        self, root: FSDPModule, optimizers: Iterable[Optimizer], *, stay_whole: bool
    ) -> None:
        """Follow the optimizers of a module.

        Args:
            root: The module.
            optimizers: They hold parameters of `root` or of what lies in it.
            stay_whole: True if the parameters of all blocks stay whole until backward.
        """
        assert isinstance(root, nn.Module)
        self.root, self._stay_whole = root, stay_whole
        self.optimized = {p for o in optimizers for g in o.param_groups for p in g["params"]}
        self.names = {name for name, p in root.named_parameters() if p in self.optimized}
        self.trained = self.names
        self.gathered: GatheredParameters = root.__dict__[GATHERED]
        shards = unused_parameters_of(root)
        assert shards is not None, "parallelize follows what it shards"
        self._shards = shards
        self._loss: Tensor | None = None
        self._shown: list[tuple[Tensor, Tensor, Tensor]] = []  # whole, its shard, the gradient
        self._has_begun = False
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._begin_optimizer)
            optimizer.register_step_post_hook(lambda *_: self._gather_again())
        object.__setattr__(root, "return_loss", self._return_loss)
        register_fsdp_forward_method(root, "return_loss")

    def begin_step(self) -> None:
        """Gather what hooks between two steps have changed in the parameters."""
        named: Any = self.root.named_parameters()  # pyright: ignore[reportAttributeAccessIssue]
        self.trained = {name for name, p in named if p.requires_grad}  # others stay frozen
        self.gathered.frozen_in_step.clear()
        if self._has_begun:  # a first step gathers by itself
            self._gather_again()

    @contextmanager
    def of(self, loss: Tensor) -> Generator[Tensor]:
        """Give the tensor to start from; afterwards the parameters of the root are whole again.

        Parameters that `toggle_optimizer` has switched off get no gradient.
        """
        self._take_what_was_changed()
        switched_off = {p for p in self.optimized if not p.requires_grad}
        self._loss = loss
        return_loss: Any = self.root.return_loss  # pyright: ignore[reportAttributeAccessIssue]
        with self._shards.set_aside(switched_off):
            yield return_loss()
        self._gather_again()

    def _return_loss(self) -> Tensor:
        """An output of the root, from which FSDP2 hears of the backward pass.

        Not an input as well: at the gradient of an input it gives the parameters up.
        """
        assert self._loss is not None
        loss, self._loss = self._loss, None
        return loss

    def end_step(self) -> None:
        """Give shards the gradients as the step leaves them: hooks and later stages see those."""
        for whole, shard, gradient in self._shown:
            if whole.grad is None and shard.grad is gradient:
                shard.grad = None
            elif isinstance(whole.grad, DTensor):
                if whole.grad is not gradient:
                    shard.grad = whole.grad
                whole.grad = None
        self._shown = []

    def _take_what_was_changed(self) -> None:
        """Whole parameters have been written, and their gradients replaced or taken away."""
        self.end_step()
        if self.gathered.is_switched_on():
            raise RuntimeError(
                "a step of manual optimization switched on requires_grad of a sharded parameter, "
                "which FSDP2 would not train: do it in a hook such as on_train_batch_start, or "
                "keep parameters whole with sharding='none'."
            )
        self.gathered.refuse_writes()

    def _show_gradients(self) -> None:
        """Let `self.parameters()` have gradients, for clipping, norms and `zero_grad`."""
        for whole, shard in self.gathered.pairs():
            if shard.grad is not None and whole.grad is None:
                whole.grad = shard.grad
                self._shown.append((whole, shard, shard.grad))

    def take_assigned(self, optimizer: Optimizer) -> None:
        """Give shards the gradients that FSDP2 has not been told of, before `optimizer` steps.

        They lie with the whole parameters. Those that a step has made of `torch.autograd.grad` are
        whole, and equal on all ranks of a domain. Those of `loss.backward()` are parts, and data
        replicas have those of their samples. Those that wait for the turn of another optimizer
        stay where they are.

        Raises:
            RuntimeError: The ranks have different ones.
        """
        self._take_what_was_changed()
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        given: list[tuple[Any, Any, Any]] = [
            (whole, whole.grad, shard)
            for whole, shard in self.gathered.pairs()
            if whole.grad is not None
            and (shard in mine or not self._shards.unreduced.wait([shard]))
        ]
        marks = [mark_of(gradient) for _, gradient, _ in given]
        if given and not all(are_alike(marks, given[0][2].device_mesh.get_all_groups())):
            raise RuntimeError(
                "the optimizer would step without the gradients of loss.backward(); call "
                "self.manual_backward(loss) instead, which reduces them over all ranks. Gradients "
                "that the step assigns itself, of torch.autograd.grad, must be equal on all ranks; "
                "sharding='none' averages them."
            )
        for whole, gradient, shard in given:
            shard.grad, whole.grad = self.gathered.part_of(gradient, shard), None
        self._show_gradients()

    def _begin_optimizer(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Take gradients after the closure, in which on_before_optimizer_step may change them."""
        self.take_assigned(optimizer)
        closure = kwargs.get("closure")
        if closure is None:
            self._take_what_was_changed()
            return None

        def run() -> Any:
            loss = closure()
            self._take_what_was_changed()
            return loss

        return args, {**kwargs, "closure": run}

    def _gather_again(self) -> None:
        for module in sharded_modules(self.root):
            # else reshard() waits for a backward pass where parameters stay whole until then
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()
            module.set_reshard_after_forward(
                module is not self.root and not self._stay_whole, recurse=False
            )
        self.root.unshard()
        for name, p in self.root.named_parameters():  # pyright: ignore[reportAttributeAccessIssue]
            is_whole = p not in self.optimized and p not in self.gathered.frozen_in_step
            if name in self.names & self.trained and is_whole:
                p.requires_grad_(True)  # it may be switched on before it is gathered next
        self.gathered.begin()
        self._has_begun = True
        self._show_gradients()
