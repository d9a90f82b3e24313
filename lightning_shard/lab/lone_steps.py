"""Runs training steps of one rank of a mesh alone, and records its timeline."""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from typing_extensions import override

from lightning_shard.lab.batches import feed
from lightning_shard.lab.simulate import alone
from lightning_shard.lab.step import WITHOUT_FILES, quiet
from lightning_shard.lab.timeline import Recorder, Timeline
from lightning_shard.processes.launch import launch
from lightning_shard.trainer.strategy import HybridShardStrategy

WARM_UP = 2  # steps that make caches and the optimizer's states


@dataclass(frozen=True)
class Training:
    """What each rank trains.

    Attributes:
        module: What is trained.
        data: The data module, which the module may ask for.
        batch: Of one data replica.
        mesh: Data replicas, and the ranks along each split dim.
        options: Further arguments of `HybridShardStrategy`.
        trainer: Arguments of the Trainer, such as its precision.
    """

    module: LightningModule
    data: LightningDataModule | None
    batch: Any
    mesh: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])


def timed_together(training: Training, steps: int) -> list[tuple[Timeline, ...]]:
    """Time steps of all ranks of a mesh, each alone, at the same time in processes of this machine.

    So each of them gets as much of this machine as among the others, and none waits.

    Args:
        training: What each rank trains.
        steps: How many are timed.

    Returns:
        For each step the timelines of all ranks.
    """
    found = launch(timed_alone, training, steps, processes=math.prod(training.mesh))
    return [*zip(*found, strict=True)]


def timed_alone(training: Training, steps: int) -> list[Timeline]:
    """Time steps of this rank as if it were alone; all ranks of the group call it at once.

    Args:
        training: What it trains.
        steps: How many are timed.
    """
    rank, processes = dist.get_rank(), dist.get_world_size()
    recorder = Recorder(rank)
    body = _Body(training, steps + 1, recorder.cut)
    dist.barrier()
    alone(body, processes=processes, rank=rank, listener=recorder)
    return recorder.steps[1 + WARM_UP : -1]  # the last has no batch to look for behind it


@dataclass(frozen=True)
class _Body:
    """What a lone rank runs; a copy of it shares the function."""

    training: Training
    steps: int
    cut: Callable[[], None]

    def __deepcopy__(self, memo: Any) -> "_Body":
        return self

    def __call__(self) -> None:
        module, data = copy.deepcopy((self.training.module, self.training.data))
        train(replace(self.training, module=module, data=data), self.steps, self.cut)


def train(training: Training, steps: int, cut: Callable[[], None], warm_up: int = WARM_UP) -> None:
    """Train on the rank that this process or thread is.

    Args:
        training: What to train; its module is changed.
        steps: After those that warm up.
        cut: Is called as each step begins, and as the last has ended.
        warm_up: Steps that make caches and the optimizer's states.
    """
    seed_everything(0, verbose=False)
    module = training.module
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        trainer = _trainer(training, warm_up + steps, cut)
        given = feed(module, training.data, "fit", [training.batch], times=warm_up + steps + 1)
        trainer.fit(module, **given)


def _trainer(training: Training, steps: int, cut: Callable[[], None]) -> Trainer:
    options = {"accelerator": "cpu", "devices": dist.get_world_size()} | training.trainer
    callbacks = options.pop("callbacks", [])
    return Trainer(
        **options,
        strategy=HybridShardStrategy(
            data_parallel_size=training.mesh[0],
            domain_parallel_size=training.mesh[1:],
            **training.options,
        ),
        max_steps=steps,
        callbacks=[_Cut(cut, steps), *callbacks],
        limit_val_batches=0,
        **WITHOUT_FILES,
    )


class _Cut(Callback):
    """Calls a function where steps begin, and where the last ends."""

    def __init__(self, cut: Callable[[], None], steps: int) -> None:
        self._cut, self._steps = cut, steps

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._cut()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if batch_idx == self._steps - 1:
            self._cut()
