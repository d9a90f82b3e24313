"""Runs one step of a module on a few processes of this machine, and tells what it showed.

The batch, the weights and the random numbers are the same in every rehearsal, so that what
differs between one process and several is the work of this package.
"""

import contextlib
import logging
import math
import os
import re
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_shard.data.split import ShardDims
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.halo import overlapping
from lightning_shard.lab.batches import Data, Stage, feed, first_batches
from lightning_shard.lab.seen import Rehearsal
from lightning_shard.lab.simulate import simulate
from lightning_shard.lab.watch import Keep, Watch
from lightning_shard.processes.launch import launch
from lightning_shard.tensor import autograd_function
from lightning_shard.tensor.escape import allow_gather
from lightning_shard.trainer.profile.traffic import counted
from lightning_shard.trainer.strategy import HybridShardStrategy

# of Trainers that leave nothing behind, and whose batches are given in order
WITHOUT_FILES: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
_GATHERED = re.compile("(.*) has no rule for split tensors; it runs on gathered ones")


@dataclass(frozen=True)
class _Task:
    """What each rank does."""

    module: LightningModule
    data: LightningDataModule | None
    stage: Stage
    batches: list[Any]
    domain: tuple[int, ...]
    shard_dims: ShardDims
    allowed: Sequence[str]
    thinner: int
    trainer: dict[str, Any]


def rehearse(
    module: LightningModule,
    data: Data,
    domain: Sequence[int],
    shard_dims: ShardDims = None,
    stage: Stage = "fit",
    *,
    allowed: Sequence[str] = (),
    thinner: int = 1,
    simulated: bool = False,
    **trainer: Any,
) -> list[Rehearsal]:
    """Run one step on the CPU, on as many processes as the domain has ranks.

    Args:
        module: What is trained; it stays as it is, the processes have copies.
        data: Whose first batch is used, for evaluation that of each loader.
        domain: Ranks along each split dim; `()` for Lightning's own strategy in one process.
        shard_dims: As for `HybridShardStrategy`.
        stage: "fit" for a training step, or the Trainer's method that calls another step.
        allowed: Names of custom autograd Functions that run as `allow_function` lets them, and not
            on gathered tensors.
        simulated: Whether the processes are ranks of `simulate` instead.
        thinner: How many times more ranks the domain has that is rehearsed on this one.
        trainer: Arguments of the Trainer, such as its precision.

    Returns:
        What each rank saw; whole gradients are with the first.

    Raises:
        NotRehearsedError: There are no batches for the stage.
    """
    batches = first_batches(module, data, stage)
    own = data if isinstance(data, LightningDataModule) else None
    ranks = tuple(domain)
    task = _Task(module, own, stage, batches, ranks, shard_dims, allowed, thinner, trainer)
    if not simulated:
        return launch(_step, task, processes=math.prod(domain))
    return simulated_as_launched(_step, task, processes=math.prod(domain))


def simulated_as_launched(function: Callable[..., Any], *args: Any, processes: int) -> list[Any]:
    """Call `simulate`, whose ranks fail as those of `launch` do.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank failed; the last line is its error.
    """
    try:
        return simulate(function, *args, processes=processes)
    except Exception as error:
        told = traceback.TracebackException.from_exception(error)
        told.__notes__ = []
        raise ProcessRaisedException("".join(told.format()), 0, os.getpid()) from error


def _step(task: _Task) -> Rehearsal:
    seed_everything(0, verbose=False)
    seen = Rehearsal()
    autograd_function.functions_to_try.update(task.allowed)
    with warnings.catch_warnings(record=True) as noted, quiet(), allow_gather():
        warnings.simplefilter("always")
        trainer = _trainer(task, seen)
        options = {} if task.stage in ("fit", "predict") else {"verbose": False}
        run = getattr(trainer, task.stage)
        with counted() as traffic, overlapping("auto", task.thinner):
            try:
                given = feed(task.module, task.data, task.stage, task.batches)
                run(task.module, **given, **options)
            except UnsupportedOperationError as error:
                seen.refused = str(error)
        seen.sent = traffic.bytes
    if task.stage != "fit":
        seen.values |= {k: v.detach().cpu() for k, v in trainer.callback_metrics.items()}
    found = (_GATHERED.match(str(warning.message)) for warning in noted)
    seen.gathered = list(dict.fromkeys(match[1] for match in found if match))
    met = autograd_function.functions_met
    seen.functions = [name for name in met if name not in task.allowed]
    if dist.get_rank():
        seen.gradients, seen.values = {}, {}
    return seen


def _trainer(task: _Task, seen: Rehearsal) -> Trainer:
    strategy: Any = "auto"
    if task.domain:
        dims: Any = task.shard_dims
        strategy = HybridShardStrategy(
            domain_parallel_size=task.domain, shard_dims=dims, exact_random=True
        )
    ranks = {"accelerator": "cpu", "devices": dist.get_world_size(), "max_steps": 1}
    options: dict[str, Any] = {**ranks, **task.trainer}
    return Trainer(
        **options,
        strategy=strategy,
        callbacks=[Watch(seen) if task.stage == "fit" else Keep(seen)],
        limit_val_batches=0 if task.stage == "fit" else 1,
        limit_test_batches=1,
        limit_predict_batches=1,
        **WITHOUT_FILES,
    )


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Without what Trainers say of themselves."""
    loggers = [
        logging.getLogger(f"lightning.pytorch{part}") for part in ("", ".utilities.rank_zero")
    ]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
