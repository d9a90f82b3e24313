"""Evaluates each sample once, also where data replicas do not divide their number.

Replicas then have other numbers of batches. A rank without a batch runs no step, calls no hook and
logs nothing. Sharded parameters are gathered before such a step on all ranks, so that no step waits
for a rank that has none (partial_step.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_shard.lightning import LightningModule, Trainer
from lightning_shard.processes.narrow import is_list
from lightning_shard.processes.torch_private.internals import tree_leaves
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer.callbacks.repeat_samples import repeats_samples
from lightning_shard.trainer.host import (
    follow_evaluation,
    log_nothing,
    logged_by,
    own_batches,
    pass_over,
    reads_in_turn,
)
from lightning_shard.trainer.logged_values import LoggedValues
from lightning_shard.trainer.partial_step import PartialStep
from lightning_shard.trainer.replica_samplers import EachOnce, own_sampler, refuse_unread
from lightning_shard.trainer.sharding import copies
from lightning_shard.trainer.steps import Steps
from lightning_shard.trainer.streams import UnevenBatch, end_together, end_with_the_longest


class UnevenEvaluation:
    """Runs the steps of validation and test for which some replicas have no batch."""

    def __init__(self, logged: LoggedValues, steps: Steps) -> None:
        """Begin without a Trainer.

        Args:
            logged: Reduces the numbers that steps log.
            steps: Gathers sharded parameters.
        """
        self._logged, self._steps = logged, steps
        self._loaders: list[DataLoader[Any]] = []  # the evaluation that is prepared has these

    def follow(
        self,
        trainer: Trainer,
        module: LightningModule,
        device: torch.device,
        replicas: Sequence[int],
        *,
        begins: Sequence[Callable[[], None]],
    ) -> None:
        """Follow the evaluations of a Trainer.

        Args:
            trainer: The Trainer.
            module: The module that it evaluates.
            device: The device of this rank's collectives.
            replicas: The data replica of each rank.
            begins: Called on all ranks before each step.
        """
        self._module, self._device, self._replicas = module, device, replicas
        self._begins = begins
        self._repeat = repeats_samples(trainer)
        follow_evaluation(trainer, self._prepared, self._step)

    def prepare(self, loader: DataLoader[Any]) -> None:
        """Let a loader for evaluation end on all ranks at once, in place."""
        self._loaders.append(loader)
        if self._repeat:
            end_together(loader, self._device)
        else:
            end_with_the_longest(loader, self._device, self._replicas)

    def _prepared(self, loop: Any) -> None:
        """Let replicas repeat samples where one step reads several batches."""
        loaders, self._loaders = self._loaders, []
        for loader in loaders if loaders and not reads_in_turn(loop) else ():
            sampler = own_sampler(loader)
            if isinstance(sampler, EachOnce):
                sampler.repeats = True
            end_together(loader, self._device)

    def _step(
        self, loop: Any, plain: Callable[..., None], batch: Any, index: int, loader: int, *args: Any
    ) -> None:
        for begin in self._begins:
            begin()
        if not isinstance(batch, UnevenBatch):
            if index == 0 and args[0] is None:  # else the step itself reads batches
                _refuse_repeated(loop, loader)
            plain(batch, index, loader, *args)
            return
        step = PartialStep(batch.present, self._device)
        modules = [self._module, *copies(loop.trainer, self._module)]
        for module in modules:
            self._steps.keep_parameters_whole(module, True)
        if batch.present[dist.get_rank()]:
            self._logged.joined = step
            try:
                with step.run():
                    plain(batch.batch, index, loader, *args)
            finally:
                self._logged.joined = None
        else:
            step.join(self._logged.exchange_nothing)
            pass_over(loop, loader)
        for module in modules:
            self._steps.keep_parameters_whole(module, False)
        # some ranks have logged nothing in this step, and will reduce with the others
        described = [logged_by(loop), _list_states(self._module)]
        dist.broadcast_object_list(described, step.present[0], device=self._device)
        log_nothing(loop, described[0])
        _begin_list_states(self._module, described[1])


def _refuse_repeated(loop: Any, number: int) -> None:
    """Refuse batches of which all replicas read the same, once they have been read."""
    runner = loop.trainer
    loaders: Any = runner.test_dataloaders if runner.testing else runner.val_dataloaders
    leaves = tree_leaves(loaders)
    for leaf in leaves[number : number + 1] if reads_in_turn(loop) else leaves:
        if isinstance(leaf, DataLoader):
            refuse_unread(own_batches(leaf))


_ListStates = dict[str, dict[str, tuple[torch.dtype, torch.Size, bool]]]


def _list_states(module: LightningModule) -> _ListStates:
    """Describe what metrics keep in lists: dtype, extents but for the first, whether split."""
    return {
        name: {
            state: (value[0].dtype, value[0].shape[1:], isinstance(value[0], DomainTensor))
            for state, value in metric.metric_state.items()
            if is_list(value) and value and isinstance(value[0], torch.Tensor)
        }
        for name, metric in module.named_modules()
        if isinstance(metric, Metric)
    }


def _begin_list_states(module: LightningModule, described: _ListStates) -> None:
    """Let lists that are empty have rows of the dtype of other ranks, of which there are none.

    torchmetrics gathers an empty list as float32, and ranks must gather one dtype.
    """
    for name, states in described.items():
        metric = module.get_submodule(name)
        for state, (dtype, extents, is_split) in states.items():
            if is_split:
                raise NotImplementedError(
                    f"the metric {name!r} keeps split tensors in {state!r}, of which a replica "
                    "without samples has none; let replicas repeat samples: "
                    "Trainer(callbacks=[lightning_shard.RepeatSamples()])."
                )
            if not getattr(metric, state):
                empty = torch.empty(0, *extents, dtype=dtype, device=module.device)
                setattr(metric, state, [empty])
