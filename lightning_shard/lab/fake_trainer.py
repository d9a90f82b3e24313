"""Traces a training step of one rank that runs alone, on fake tensors: shapes, and no numbers.

The Trainer is that of a real run. What each operation would take is counted (timeline.py). Integers
stay real where nothing fake went into them, since sizes and indices are computed with them. Fake
tensors are equal and finite (known_numbers.py), and another number that Python reads is 1. Where a
step reads one, it is traced again with a further number. If the two differ, or an operation needs
numbers, such as the rows that a mask chooses, the step runs on real tensors instead.
"""

import copy
import gc
import math
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.fsdp import plain_gradients
from lightning_shard.lab.batches import copy_of
from lightning_shard.lab.device_autocast import autocast_of_gpu
from lightning_shard.lab.fake_modes import (
    NUMBER,
    OTHER_NUMBER,
    Fake,
    IntegersStay,
    Real,
    apply,
    as_fake,
    forgetting,
)
from lightning_shard.lab.follow import Follow
from lightning_shard.lab.host_link import Counted
from lightning_shard.lab.kernel_costs import Costs
from lightning_shard.lab.machine import Device
from lightning_shard.lab.run import Task, run_here
from lightning_shard.lab.simulate import alone
from lightning_shard.lab.timeline import Ledger, Peak, Recorder, Timeline
from lightning_shard.lightning import Callback, LightningModule, Trainer
from lightning_shard.memory import offload as offload
from lightning_shard.processes.errors import LightningShardError
from lightning_shard.processes.torch_private.internals import (
    FakeTensorMode,
    fake_copies,
    tree_map_only,
)
from lightning_shard.trainer.split_summary import SplitSummary

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
    torch.ones((), requires_grad=True, device="cpu").sum().backward()
    with FakeTensorMode():  # torch 2.11 keeps a pointer into the first thread that enters it
        pass
    try:
        found = trace(NUMBER)
        if not found.reads_numbers or _is_same(found, trace):
            return found
    except _ReadError as error:  # such as the module's own check of a number
        try:
            return trace(OTHER_NUMBER)
        except UnsupportedOperationError:
            raise
        except Exception:
            if isinstance(error.__cause__, UnsupportedOperationError):
                raise error.__cause__ from None
    except UnsupportedOperationError:
        raise
    except RuntimeError:  # fake tensors refuse; a mistake of the module comes again below
        pass
    return trace(None)


class _ReadError(LightningShardError):
    """A step failed that had read numbers which it does not have; the cause is its error."""


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
    try:
        with _collecting_by_operations():
            alone(body, processes=math.prod(task.mesh), rank=rank, listener=recorder)
    except Exception as error:
        if body.mode.reads_numbers:
            raise _ReadError from error
        raise
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
        self.follower = Follow(ledger, self.mode)

    def __deepcopy__(self, memo: Any) -> "_Body":
        return self

    def _has_gradient(self, is_there: Tensor, trained: list[nn.Parameter]) -> list[bool]:
        is_there.tolist()  # it waits for the device
        return [p.grad is not None for p in trained]

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
            if "torch._dynamo" in sys.modules:  # its import takes seconds
                # each part that is compiled is counted as it is written
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(replaced(offload, "MOVER", Counted(self._ledger)))
            stack.enter_context(replaced(offload, "free_bytes", lambda _: self._ledger.free))
            stack.enter_context(replaced(plain_gradients, "begin_sum", self._begin_sum))
            stack.enter_context(replaced(plain_gradients, "has_gradient", self._has_gradient))
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
            with ExitStack() as copying:
                if self._is_fake:
                    copying.enter_context(fake_copies(self.mode))
                    copying.enter_context(IntegersStay())
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
