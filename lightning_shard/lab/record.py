"""Records what a run gives: losses, weights, gradients, outputs, and how far it was split.

All values are those of the whole: parts of the ranks are gathered, so that a run on a mesh can be
compared with one in one process. Gathering is a collective, which all ranks call together.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.checkpoint.foreign import plain_name
from lightning_shard.checkpoint.state import full, full_module_state, parameter_names
from lightning_shard.data.tree import named_leaves
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.fsdp.complex_pairs import as_complex, pair_names
from lightning_shard.lab.differences import Value, relative
from lightning_shard.lab.outputs import Output, Outputs
from lightning_shard.lab.run import Task, on_each_rank, run_here
from lightning_shard.lightning import Callback, LightningModule, Trainer
from lightning_shard.ops.registry import name_of
from lightning_shard.processes.narrow import is_mapping
from lightning_shard.tensor import autograd_function, gathering
from lightning_shard.tensor.escape import allow_gather
from lightning_shard.tensor.held_alike import gap_of
from lightning_shard.tensor.placement import gather
from lightning_shard.trainer.split_summary import SplitSummary, split_summary
from lightning_shard.trainer.strategy import HybridShardStrategy


@dataclass(frozen=True)
class Inspection:
    """The step in which a run is looked into, and after which it ends.

    Attributes:
        step: The step whose gradients and buffers are kept.
        outputs: True to keep the outputs of modules or functions, too.
        module: The module of which each function's output is kept; None: every module's output.
    """

    step: int = 0
    outputs: bool = False
    module: str | None = None


@dataclass
class Record:
    """The values that a run left: losses, weights, gradients and outputs.

    Attributes:
        losses: The loss of each training step, the mean over the data replicas.
        has_loss: False if the last step returned none, as a manual one may.
        weights: Parameters and buffers after each step, by name; not of a run that is looked into.
        gradients: Gradients of the step that is looked into, by the name of the parameter. Each is
            that of the first update of its optimizer, of which a manual step may have several; or,
            if the step updates nothing, that of its end.
        buffers: Buffers before the first of these updates, by name.
        sizes: Sum and norm of these gradients and buffers on this rank, by name.
        apart: The relative difference of these between ranks of a domain, by name.
        outputs: The outputs of modules or functions in that step, in the order of their ends.
        values: The values of each data replica that a step logged, by name, and those that one of
            evaluation returned, whole over the domain.
        gathered: Functions without a rule for split tensors, which ran on gathered ones.
        functions: Custom autograd Functions among them.
        refused: The sentence with which the run stopped at an operation that cannot be split.
        apart_in_steps: Sentences of what ranks that share samples compute differently.
        split: The entries of the first batch that were split.
    """

    losses: list[float] = field(default_factory=list[float])
    has_loss: bool = False
    weights: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    sizes: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    apart: dict[str, float] = field(default_factory=dict[str, float])
    outputs: list[Output] = field(default_factory=list[Output])
    values: list[dict[str, Value]] = field(default_factory=list[dict[str, Value]])
    gathered: list[str] = field(default_factory=list[str])
    functions: list[str] = field(default_factory=list[str])
    refused: str = ""
    apart_in_steps: list[str] = field(default_factory=list[str])
    split: SplitSummary = field(default_factory=SplitSummary)


def record(
    task: Task,
    inspection: Inspection | None = None,
    *,
    nudged: bool = False,
    allowed: Sequence[str] = (),
) -> Record:
    """Run a task on its ranks, and return what it gave.

    Args:
        task: The task to run.
        inspection: Where the run is looked into; None: after each step its weights are kept.
        nudged: True to move each first weight to the number beside it.
        allowed: Names of custom autograd Functions that run as `allow_function` lets them, and not
            on gathered tensors.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank failed; the last line is its error.
    """
    body = partial(record_here, inspection=inspection, nudged=nudged, allowed=allowed)
    records = on_each_rank(body, task)
    replicas = records[:: math.prod(task.mesh[1:])]  # the first rank of each
    first = records[0]
    losses = zip(*(r.losses for r in replicas), strict=True)
    first.losses = [math.fsum(each) / len(replicas) for each in losses]
    first.values = [values for r in replicas for values in r.values]
    domain = records[: math.prod(task.mesh[1:])]
    first.apart = {name: _apart([each.sizes[name] for each in domain]) for name in first.sizes}
    return first


def _apart(sizes: Sequence[tuple[float, float]]) -> float:
    """Return the relative difference of sum or norm between the first rank and another one."""
    found = torch.tensor(sizes, dtype=torch.float64, device="cpu")  # (ranks, 2)
    scale = found[:, 1].nan_to_num().max()
    return relative(float(gap_of(found, found[:1]).abs().max()), float(scale))


def record_here(
    task: Task,
    inspection: Inspection | None = None,
    *,
    nudged: bool = False,
    allowed: Sequence[str] = (),
) -> Record:
    """Run a task on the rank that this process or thread is; the arguments are those of `record`.

    Weights, gradients and outputs are with the first rank only.
    """
    autograd_function.functions_met.clear()
    autograd_function.functions_to_try.update(allowed)
    gathering.gathered_functions.clear()
    found, values = Record(), dict[str, Value]()
    with allow_gather():
        try:
            trainer = run_here(task, _Recorder(found, values, inspection, nudged=nudged))
        except UnsupportedOperationError as error:
            found.refused = str(error)
        else:
            logged = {k: v.detach().cpu() for k, v in trainer.callback_metrics.items()}
            found.values = [values | logged]
    found.gathered = list(map(name_of, gathering.gathered_functions))
    found.functions = [name for name in autograd_function.functions_met if name not in allowed]
    return found


class _Recorder(Callback):
    """Puts what a run gives into its record."""

    def __init__(
        self,
        found: Record,
        values: dict[str, Value],
        inspection: Inspection | None,
        *,
        nudged: bool,
    ) -> None:
        self._found, self._values, self._look, self._nudged = found, values, inspection, nudged
        self._outputs: Outputs | None = None
        self._looked = set[Optimizer]()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Go on where ranks compute different things: the numbers say how far that matters."""
        if isinstance(trainer.strategy, HybridShardStrategy):
            trainer.strategy.steps.same.differences = self._found.apart_in_steps

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nudge the weights, once precision and device are chosen."""
        if self._nudged:
            draw = torch.Generator().manual_seed(1)
            for p in pl_module.parameters():
                _nudge(p, draw)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self._found.split = split_summary(batch)
        if self._look is not None and self._look.outputs and batch_idx == self._look.step:
            self._outputs = Outputs(pl_module, self._look.module, self._found.outputs)

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._note_outputs(False)  # backward may call modules again
        if pl_module.automatic_optimization:
            self._end_of_outputs()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note_outputs(True)  # a manual step goes on

    def _note_outputs(self, is_open: bool) -> None:
        if self._outputs is not None:
            self._outputs.is_open = is_open

    def _end_of_outputs(self) -> None:
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Keep gradients and buffers, under the names that the plain module gives them."""
        inspection, seen = self._look, self._looked
        if inspection is None or optimizer in seen or len(self._found.losses) < inspection.step:
            return
        self._note_outputs(False)
        self._keep(pl_module, [*parameter_names(optimizer, pl_module)] if seen else None)
        self._note_outputs(True)
        seen.add(optimizer)
        trainer.should_stop = True

    def _keep(self, pl_module: LightningModule, names: Sequence[str] | None) -> None:
        """Keep these gradients; None: all of them, and the buffers."""
        own = _gradients(pl_module)
        kept = _state(pl_module) | own if names is None else {name: own[name] for name in names}
        for name, value in kept.items():
            of_all = value.double() if not value.is_complex() else torch.view_as_real(value)
            self._found.sizes[name] = float(of_all.sum()), float(of_all.norm())
            into = self._found.gradients if name in own else self._found.buffers
            into |= {} if dist.get_rank() else {name: value}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_of_outputs()
        if self._look is not None and not self._looked and batch_idx == self._look.step:
            self._keep(pl_module, None)  # a manual step need not update in each batch
        loss: Any = outputs.get("loss") if is_mapping(outputs) else outputs
        self._found.losses.append(math.nan if loss is None else float(loss))
        self._found.has_loss = loss is not None
        if self._look is None:
            state = _state(pl_module)
            self._found.weights.append({} if dist.get_rank() else state)
        elif dist.get_rank():
            self._found.outputs.clear()

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
        """Keep what the step returned for the batch of a loader."""
        self._found.split = split_summary(batch)
        of_loader = f" of loader {dataloader_idx}" if dataloader_idx else ""
        for path, leaf in named_leaves(outputs):
            name = f"output{of_loader}" + "".join(f"[{key!r}]" for key in path)
            if isinstance(leaf, Tensor):
                self._values[name] = gather(leaf).detach().cpu().clone()
            elif isinstance(leaf, bool | int | float | str):
                self._values[name] = leaf

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end


def _state(module: LightningModule) -> dict[str, Tensor]:
    """Return copies of whole parameters and buffers."""
    state = full_module_state(module)
    return {k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}


def _gradients(module: LightningModule) -> dict[str, Tensor]:
    """Return copies of whole gradients, zeros where a parameter has none.

    A gradient is read where it lies: in a manual step a parameter is whole, and its gradient may be
    a shard.
    """
    found: dict[str, Tensor] = {}
    pairs = pair_names(module)
    for name, p in module.named_parameters(remove_duplicate=False):
        gradient = p.new_zeros(p.shape) if p.grad is None else p.grad.detach()
        whole = full(as_complex(gradient) if name in pairs else gradient)
        found[plain_name(name)] = whole.to_dense().clone()
    return found


@torch.no_grad()
def _nudge(p: Tensor, draw: torch.Generator) -> None:
    """Move each number to the next larger or the next smaller one."""
    real = torch.view_as_real(p) if p.is_complex() else p
    up = torch.rand(real.shape, generator=draw, device="cpu") < 0.5
    ends = torch.where(up, math.inf, -math.inf).to(real)
    with contextlib.suppress(NotImplementedError):  # for a dtype that has no such function
        real.copy_(torch.nextafter(real, ends))
