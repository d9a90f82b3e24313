"""Traces a training step of one rank that runs alone, on fake tensors: shapes, and no numbers.

The Trainer is that of a real run. What each operation would take is counted (timeline.py). Integers
stay real where nothing fake went into them, since sizes and indices are computed with them. Fake
tensors are equal, and a fake number that Python reads is 1. Where a step reads one, it is traced
again with another number. If the two differ, or an operation needs numbers, such as the rows that a
mask chooses, the step runs on real tensors instead.
"""

import copy
import gc
import math
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.fsdp import plain_gradients
from lightning_shard.lab.batches import copy_of
from lightning_shard.lab.device_autocast import autocast_of_gpu
from lightning_shard.lab.fake_modes import (
    NUMBER,
    OTHER_NUMBER,
    Fake,
    Real,
    apply,
    as_fake,
    forgetting,
)
from lightning_shard.lab.host_link import Counted
from lightning_shard.lab.kernel_costs import Costs
from lightning_shard.lab.machine import Device
from lightning_shard.lab.run import Task, run_here
from lightning_shard.lab.simulate import alone
from lightning_shard.lab.timeline import Ledger, Peak, Recorder, Timeline
from lightning_shard.lightning import Callback, LightningModule, Trainer
from lightning_shard.memory import offload as offload
from lightning_shard.processes.torch_private.internals import (
    FakeTensorMode,
    fake_copies,
    tree_leaves,
    tree_map_only,
)
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer.split_summary import SplitSummary, split_summary

SAME = 0.01  # the largest relative difference of two traces that are taken for one


@dataclass(frozen=True)
class Traced:
    """The account of one step of a rank.

    Attributes:
        timeline: Its computation and its collectives.
        peak: The moment at which it holds most memory.
        activations: Bytes that forward keeps for backward.
        split: The entries of the batch that are split, and those that stay whole.
        is_measured: True if the step ran on real tensors.
        reads_numbers: True if the step read a number of a fake tensor.
        out: Bytes that it sends to the host: of offloaded activations, or where its turns end.
        back: Bytes that it brings back from there.
        on_host: The most bytes that it has there.
        waited: Seconds in which it waits for copies: of offloaded activations, and of the batch.
        received: Seconds of them in which it waits for the batch.
    """

    timeline: Timeline
    peak: Peak
    activations: int
    split: SplitSummary
    is_measured: bool = False
    reads_numbers: bool = False
    out: int = 0
    back: int = 0
    on_host: int = 0
    waited: float = 0.0
    received: float = 0.0

    def equals(self, other: "Traced") -> bool:
        """Return whether another trace has the same collectives, and the same time and memory."""
        return (
            self.timeline.collectives == other.timeline.collectives
            and math.isclose(self.timeline.computed, other.timeline.computed, rel_tol=SAME)
            and math.isclose(self.peak.bytes, other.peak.bytes, rel_tol=SAME)
        )


def traced(
    task: Task,
    rank: int,
    device: Device | None = None,
    *,
    in_turns: bool = False,
    budget: int = 0,
    costs: Costs | None = None,
) -> Traced:
    """Trace a step of one rank of the task's mesh, on real tensors only if fake ones do not do.

    Args:
        task: The training; it has one batch, that of a data replica.
        rank: The rank that runs alone.
        device: The device whose seconds are counted; None: only bytes are counted.
        in_turns: If true, the ranks take turns on one device, and what waits lies on the host.
        budget: Bytes that all of them together may keep on the device between their turns.
        costs: Tells what kernels take; None: the rates of the device do.

    Raises:
        UnsupportedOperationError: The module uses an operation that cannot be split so.
    """
    ranks = math.prod(task.mesh) if in_turns else 0
    trace = partial(_trace, task, rank, lambda: Ledger(device, ranks, budget, costs))
    # torch counts devices as its first backward pass begins; on fake tensors it finds one, starts
    # threads, and no process that is forked afterwards can differentiate
    torch.ones((), requires_grad=True).sum().backward()
    with FakeTensorMode():  # torch 2.11 keeps a pointer into the first thread that enters it
        pass
    try:
        found = trace(NUMBER)
        if not found.reads_numbers or _is_same(found, trace):
            return found
    except UnsupportedOperationError:
        raise
    except RuntimeError:  # fake tensors refuse; a mistake of the module comes again below
        pass
    return trace(None)


def _is_same(found: Traced, trace: Callable[[int], Traced]) -> bool:
    """Return whether a step does the same with other numbers, unless it refuses these."""
    try:
        return found.equals(trace(OTHER_NUMBER))
    except Exception:  # the module's own check of a number, which is no more true here
        return True


def _trace(task: Task, rank: int, begun: Callable[[], Ledger], number: int | None) -> Traced:
    ledger = begun()
    ledger.is_split = math.prod(task.mesh[1:]) > 1
    at_wait = ledger.hand_over if ledger.in_turns else None
    recorder = Recorder(rank, lambda: ledger.seconds, at_wait)
    body = _Body(task, ledger, recorder, number)
    with _collecting_by_operations():
        alone(body, processes=math.prod(task.mesh), rank=rank, listener=recorder)
    follower = body.follower
    return Traced(
        recorder.steps[-1], ledger.peak, follower.activations, follower.split,
        number is None, body.mode.reads_numbers, ledger.out, ledger.back, ledger.on_host,
        ledger.waited, ledger.received,
    )  # fmt: skip


@contextmanager
def _collecting_by_operations() -> Generator[None]:
    """Collect garbage where `_note` does, so that equal steps hold equal memory.

    Python collects it after as many new objects as this process happens to have made.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Body:
    """The function of the rank; all ranks share this object."""

    def __init__(self, task: Task, ledger: Ledger, recorder: Recorder, number: int | None) -> None:
        self._task, self._ledger, self._recorder = task, ledger, recorder
        self._is_fake = number is not None
        self.mode: Any = Real(ledger) if number is None else Fake(ledger, number)
        self.follower = _Follow(ledger, self.mode)

    def __deepcopy__(self, memo: Any) -> "_Body":
        return self

    def _begin_sum(self, flat: Tensor, group: dist.ProcessGroup) -> Any:
        if self._ledger.in_turns:  # tiles add up in the parameters' gradients
            self._ledger.leave_out([flat])
        self._recorder.named = "mean_of_gradients"
        try:
            return dist.all_reduce(flat, group=group, async_op=True)
        finally:
            self._recorder.named = None

    def __call__(self) -> None:
        given = self._task
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # about addresses of tensors without memory
            stack.enter_context(replaced(offload, "MOVER", Counted(self._ledger)))
            stack.enter_context(replaced(offload, "free_bytes", lambda _: self._ledger.free))
            stack.enter_context(replaced(plain_gradients, "begin_sum", self._begin_sum))
            batch = given.batches[0]
            if self._is_fake:
                stack.enter_context(replaced(nn.Module, "_apply", apply))
                swap = torch.utils.swap_tensors
                stack.enter_context(
                    replaced(torch.utils, "swap_tensors", forgetting(self.mode, swap))
                )
            stack.enter_context(self.mode)
            if self._ledger.is_of_gpu:
                stack.enter_context(autocast_of_gpu())
            with fake_copies(self.mode) if self._is_fake else ExitStack():
                module, data = copy_of(given.module), copy.copy(given.data)
            self._ledger.leave_out([*given.module.parameters(), *given.module.buffers()])
            if data is not None:  # it was set up for its batch, and could read files here
                for hook in ("prepare_data", "setup"):
                    setattr(data, hook, _nothing)
            if self._is_fake:
                batch = tree_map_only(object, as_fake, batch)
            task = replace(given, module=module, data=data, batches=[batch])
            stack.callback(self.follower.end)  # also where the step is refused
            if task.stage == "fit":
                train(task, 1, self._recorder.cut, self.follower, warm_up=1)
            else:
                run_here(task, _Cut(self._recorder.cut, 1), self.follower)


def train(
    task: Task, steps: int, cut: Callable[[], None], *callbacks: Callback, warm_up: int
) -> None:
    """Train on the rank that this process or thread is.

    Args:
        task: The training; its module is changed, and its first batch is given in each step.
        steps: The number of steps after those that warm up.
        cut: A function that is called as each step begins, and as the last has ended.
        callbacks: Further callbacks.
        warm_up: The number of steps that make caches and the optimizer's states.
    """
    count = warm_up + steps
    batches = [task.batches[0]] * (count + 1)  # so that no step is the last of its loader
    run_here(replace(task, batches=batches), _Cut(cut, count), *callbacks)


class _Cut(Callback):
    """Calls a function where steps begin, and where the last ends."""

    def __init__(self, cut: Callable[[], None], steps: int) -> None:
        self._cut, self._steps = cut, steps

    def _now(self, *_: Any, **__: Any) -> None:
        self._cut()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._cut()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._steps - 1:
            self._cut()
            trainer.should_stop = True

    # one batch of another stage is a step
    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _now
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _now


def _nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """Let an attribute have another value, while open."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _update_by_lists(optimizers: Iterable[Optimizer]) -> None:
    """Let optimizers update all parameters at once, as torch does by default on a device.

    What they compute on the way is then as large as all parameters together.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True


class _Follow(Callback):
    """Gives the ledger the part of the step that computes, and the causes of memory."""

    def __init__(self, ledger: Ledger, mode: Any) -> None:
        self.split, self.activations = SplitSummary(), 0
        self._ledger, self._mode = ledger, mode
        self._hooks = ExitStack()
        self._open: list[str] = []
        self._names: dict[nn.Module, str] = {}

    def __deepcopy__(self, memo: Any) -> "_Follow":
        return self

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._names = {module: name for name, module in pl_module.named_modules()}
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
        self._mode.is_in_step = False
        self._ledger.place = "backward"
        self.activations = max(self.activations, self._ledger.held("activations"))

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        self._ledger.place = "the optimizer's step"
        self._ledger.hold(_locals([p.grad for p in pl_module.parameters()]), "gradients")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
