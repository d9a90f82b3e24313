"""Checks whether a module gives on several processes what it gives on one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_shard.data.split import ShardDims
from lightning_shard.lab.batches import (
    STEPS,
    Data,
    NotRehearsedError,
    Stage,
    has_own_loaders,
    stages_of,
)
from lightning_shard.lab.differences import differences, norm, tolerance_of
from lightning_shard.lab.seen import Rehearsal
from lightning_shard.lab.step import rehearse
from lightning_shard.lab.verdict import Check, StepCheck


def check(
    module: LightningModule,
    data: Data,
    domain_parallel_size: int | Sequence[int] = 2,
    shard_dims: ShardDims = None,
    *,
    simulated: bool = False,
    **trainer: Any,
) -> Check:
    """Run each step in one process and on the ranks of a domain on this machine, and compare.

    The steps are those that the module defines: training, validation, test and prediction.

    Args:
        module: An ordinary LightningModule, which stays as it is. Try a small one: all of it is
            computed on the CPU of this machine.
        data: A data module, or a DataLoader of training batches, whose first batch then serves
            the other steps too.
        domain_parallel_size: Ranks that share each sample, or one number for each split dim.
        shard_dims: As for `HybridShardStrategy`.
        simulated: Whether the ranks are simulated in this process (`simulate`), which is quicker,
            and allows for many of them, instead of processes.
        trainer: Arguments of the Trainer, such as `precision="64-true"`.

    Returns:
        What was found. Functions without a rule are all named, and not only the first one.
    """
    sizes = domain_parallel_size
    domain = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    trainer["simulated"] = simulated
    options: dict[str, Any] = {"domain": domain, "shard_dims": shard_dims, "trainer": trainer}
    found = Check(domain, _check_step(module, data, "fit", **options))
    for stage in stages_of(module):
        step = STEPS[stage][0]
        try:
            found.evaluation[step] = _check_step(module, data, stage, **options)
        except NotRehearsedError as reason:
            found.not_rehearsed[step] = str(reason)
    return found


def _check_step(
    module: LightningModule,
    data: Data,
    stage: Stage,
    *,
    domain: tuple[int, ...],
    shard_dims: ShardDims,
    trainer: dict[str, Any],
) -> StepCheck:
    def compare(options: dict[str, Any]) -> StepCheck:
        (alone,) = _alone(module, data, stage, options)
        ranks = rehearse(module, data, domain, shard_dims, stage, **options)
        step = compared(alone, ranks[0], stage)

        def again(allowed: list[str]) -> Rehearsal:
            given: dict[str, Any] = {"allowed": allowed, **options}
            return rehearse(module, data, domain, shard_dims, stage, **given)[0]

        step.functions = _tried(ranks[0].functions, again, lambda r: compared(alone, r, stage))
        return step

    found = compare(trainer)
    if found.refused or found.is_exact or "precision" in trainer:
        return found
    try:  # sums that nearly cancel differ by more than any tolerance for float32
        double = compare({**trainer, "precision": "64-true"})
    except ProcessRaisedException:  # not every module computes in float64
        return found
    double.rounding = found.worst
    return double


def _tried(
    functions: list[str],
    rehearsed: Callable[[list[str]], Rehearsal],
    compare: Callable[[Rehearsal], StepCheck],
) -> dict[str, str]:
    """What `allow_function` does for each Function, in words.

    Behind one that is gathered others do not meet split tensors, so those that agree stay allowed.
    """
    said: dict[str, str] = {}
    agreed: list[str] = []
    waiting = list(functions)
    while waiting:
        name = waiting.pop(0)
        try:
            first = rehearsed([*agreed, name])
        except ProcessRaisedException as error:  # of its forward or its backward
            said[name] = f"it fails: {str(error).strip().splitlines()[-1]}"
            continue
        step = compare(first)
        said[name] = _agreement(step)
        if step.is_exact:
            agreed.append(name)
            waiting += [new for new in first.functions if new not in {*said, *waiting}]
    return said


def _agreement(step: StepCheck) -> str:
    """What a step with a Function allowed says of it, in words."""
    if step.refused:
        return f"it stops: {step.refused}"
    if step.is_exact:
        return "value and gradient agree" if step.step == "training_step" else "its values agree"
    if step.loss_difference > step.tolerance or step.step != "training_step":
        return f"its value differs, by {step.loss_difference or step.worst:.1e} of the whole"
    return f"its value agrees, and gradients differ by up to {step.worst:.1e}"


def _alone(
    module: LightningModule, data: Data, stage: Stage, options: dict[str, Any]
) -> list[Rehearsal]:
    try:
        return rehearse(module, data, (), None, stage, **options)
    except ProcessRaisedException as error:
        if stage == "fit" or has_own_loaders(module, data, stage):
            raise
        reason = str(error).strip().splitlines()[-1]
        raise NotRehearsedError(f"in one process it fails on a training batch, {reason}") from error


def compared(alone: Rehearsal, first: Rehearsal, stage: Stage) -> StepCheck:
    """The difference between one process and the first rank of a domain."""
    found = StepCheck(STEPS[stage][0], first.split, first.refused, first.gathered)
    if found.refused:
        return found
    if stage != "fit":
        found.differences = differences(first.values, alone.values)
        found.tolerance = tolerance_of(alone.values)
        return found
    found.loss = alone.loss or 0.0
    found.loss_difference = abs((first.loss or 0.0) - found.loss) / max(abs(found.loss), 1e-30)
    total = norm(torch.tensor([norm(value) for value in alone.gradients.values()]))
    found.differences = differences(first.gradients, alone.gradients, total)
    found.tolerance = tolerance_of(alone.gradients)
    return found
