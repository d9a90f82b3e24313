"""Trains some steps of a module in one process or on a mesh, and records what each of them gave.

Batches, first weights and random numbers are those of one process: each data replica gets its share
of every batch. So what differs is the work of this package, or of a module to which shares of a
batch are not alike, as batch norm is without synchronisation.
"""

import contextlib
import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
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
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.data.split import ShardDims
from lightning_shard.data.tree import leaves_of, map_leaves
from lightning_shard.lab.outputs import Output, Outputs
from lightning_shard.lab.step import WITHOUT_FILES, quiet, simulated_as_launched
from lightning_shard.processes.launch import launch
from lightning_shard.processes.narrow import is_mapping
from lightning_shard.tensor.escape import allow_gather
from lightning_shard.trainer.strategy import HybridShardStrategy

Mesh = tuple[int, ...]  # data replicas, and the ranks along each split dim


@dataclass(frozen=True)
class Look:
    """Where a run is looked into.

    Attributes:
        step: The step whose outputs are kept, after which the run ends.
        module: The module of which each function's output is kept; None: every module's output.
    """

    step: int
    module: str | None = None


@dataclass(frozen=True)
class Task:
    """A run of some steps.

    Attributes:
        module: What is trained; it stays as it is.
        data: The data module, which the module may ask for.
        batches: Of one process, one for each step.
        mesh: The ranks; `()` for one process without any sharding.
        shard_dims: As for `HybridShardStrategy`.
        trainer: Arguments of the Trainer, such as its precision.
        simulated: Whether ranks are simulated in this process.
        nudged: Whether each first weight is moved to the number beside it.
        look: Where it is looked into.
    """

    module: LightningModule
    data: LightningDataModule | None
    batches: Sequence[Any]
    mesh: Mesh
    shard_dims: ShardDims
    trainer: dict[str, Any]
    simulated: bool = False
    nudged: bool = False
    look: Look | None = None


@dataclass
class Course:
    """What a run gave.

    Attributes:
        losses: Of each step, the mean over the data replicas.
        weights: Parameters and buffers after each step, by name; with the first rank.
        outputs: What modules or functions gave in the step that was looked into.
        gradients: Of that step, by the name of the parameter.
        buffers: As that step leaves them, by name.
    """

    losses: list[float] = field(default_factory=list[float])
    weights: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    outputs: list[Output] = field(default_factory=list[Output])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def run(task: Task) -> Course:
    """Train, and return what the first rank saw.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank failed.
    """
    ranks = math.prod(task.mesh)
    if not task.simulated:
        courses = launch(_train, task, processes=ranks)
    else:
        courses = simulated_as_launched(partial(_train, task), processes=ranks)
    losses = zip(*(course.losses for course in courses), strict=True)
    courses[0].losses = [math.fsum(each) / ranks for each in losses]
    return courses[0]


def _train(task: Task) -> Course:
    seed_everything(0, verbose=False)
    follower = _Follow(task)
    module, data = copy.deepcopy((task.module, task.data))
    replica = dist.get_rank() // max(1, math.prod(task.mesh[1:]))
    own: Any = [_share(batch, replica, *task.mesh[:1]) for batch in task.batches]
    loader: DataLoader[Any] = DataLoader(own, batch_size=None)  # a list serves as a dataset
    given: dict[str, Any] = {"train_dataloaders": loader}
    if data is not None:
        data.train_dataloader, given = lambda: loader, {"datamodule": data}
    with warnings.catch_warnings(), quiet(), allow_gather():
        warnings.simplefilter("ignore")
        _trainer(task, follower).fit(module, **given)
    return follower.course


def _trainer(task: Task, follower: Callback) -> Trainer:
    strategy: Any = "auto"
    if task.mesh:
        dims: Any = task.shard_dims
        if isinstance(dims, list | tuple):  # of a mesh with more axes
            dims = dims[: len(task.mesh) - 1]
        strategy = HybridShardStrategy(
            data_parallel_size=task.mesh[0],
            domain_parallel_size=task.mesh[1:],
            shard_dims=dims,
            exact_random=True,
        )
    options: dict[str, Any] = {"accelerator": "cpu", "devices": dist.get_world_size()}
    return Trainer(
        **options | task.trainer,
        max_steps=len(task.batches),
        strategy=strategy,
        callbacks=[follower],
        limit_val_batches=0,
        **WITHOUT_FILES,
    )


def samples_of(batch: Any) -> int:
    """The extent of the first dim of the first tensor."""
    sizes = [len(x) for x in leaves_of(batch) if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes else 1


def _share(batch: Any, replica: int, replicas: int = 1) -> Any:
    """The samples of a data replica, in memory of their own."""
    count = samples_of(batch)

    def share(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        whole = replicas == 1 or not x.ndim or len(x) != count
        return x.clone() if whole else x.chunk(replicas)[replica].clone()

    return map_leaves(share, batch)


class _Follow(Callback):
    """Records the steps of a run."""

    def __init__(self, task: Task) -> None:
        self.course, self._task = Course(), task
        self._outputs: Outputs | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nudge, once precision and device are chosen."""
        if self._task.nudged:
            draw = torch.Generator().manual_seed(1)
            for p in pl_module.parameters():
                _nudge(p, draw)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        look = self._task.look
        if look is not None and batch_idx == look.step:
            self._outputs = Outputs(pl_module, look.module, self.course.outputs)

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        if self._outputs is not None:
            self._outputs.close()

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Read gradients and buffers as a state, whose names are those of the plain module."""
        if self._outputs is None or self.course.gradients:
            return
        with torch.no_grad():
            for p in pl_module.parameters():
                p.zero_() if p.grad is None else p.copy_(p.grad)
        names = {name for name, _ in self._task.module.named_parameters()}
        state = full_module_state(pl_module)
        values = {k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}
        self.course.gradients = {k: v for k, v in values.items() if k in names}
        self.course.buffers = {k: v for k, v in values.items() if k not in names}
        trainer.should_stop = True

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loss: Any = outputs.get("loss") if is_mapping(outputs) else outputs
        self.course.losses.append(math.nan if loss is None else float(loss))
        if self._task.look is None:
            state = full_module_state(pl_module)
            kept = {k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}
            self.course.weights.append({} if dist.get_rank() else kept)
        elif dist.get_rank():
            self.course.outputs.clear()


@torch.no_grad()
def _nudge(p: Tensor, draw: torch.Generator) -> None:
    """Move each number to the next larger or the next smaller one."""
    real = torch.view_as_real(p) if p.is_complex() else p
    up = torch.rand(real.shape, generator=draw) < 0.5
    ends = torch.where(up, math.inf, -math.inf).to(real)
    with contextlib.suppress(NotImplementedError):  # of a dtype that has no such function
        real.copy_(torch.nextafter(real, ends))
