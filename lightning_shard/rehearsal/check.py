"""Checks whether a module gives on several processes what it gives on one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_shard.rehearsal.batches import (
    STEPS,
    Data,
    NotRehearsedError,
    Stage,
    has_own_loaders,
    stages_of,
)
from lightning_shard.rehearsal.differences import differences, norm, tolerance_of
from lightning_shard.rehearsal.seen import Rehearsal
from lightning_shard.rehearsal.step import rehearse
from lightning_shard.tensor.batch import ShardDims
from lightning_shard.trainer.split_summary import SplitSummary


@dataclass
class StepCheck:
    """How one step on several ranks compares with the step in one process.

    Attributes:
        step: The method of the module, such as "validation_step".
        split: Which entries of its batch were split.
        refused: The sentence with which the step stopped, if it did.
        gathered: Functions without a rule for split tensors, by name.
        functions: What `allow_function` did for each of them that is a custom autograd Function.
        differences: The relative difference of each value, the largest first: gradients and buffers
            of a training step, outputs and logged values of another.
        loss: The loss of a training step in one process.
        loss_difference: The relative difference of that loss on several ranks.
        tolerance: The largest difference that rounding explains.
        rounding: The largest difference in the module's own precision, where that left a doubt and
            the comparison was repeated in float64; else 0.
    """

    step: str
    split: SplitSummary = field(default_factory=SplitSummary)
    refused: str = ""
    gathered: list[str] = field(default_factory=list[str])
    functions: dict[str, str] = field(default_factory=dict[str, str])
    differences: dict[str, float] = field(default_factory=dict[str, float])
    loss: float = 0.0
    loss_difference: float = 0.0
    tolerance: float = 0.0
    rounding: float = 0.0

    @property
    def worst(self) -> float:
        """The largest relative difference."""
        return max([self.loss_difference, *self.differences.values()])

    @property
    def is_exact(self) -> bool:
        """Whether the step ran, and gave the numbers of one process."""
        return not self.refused and self.worst <= self.tolerance

    @property
    def name(self) -> str:
        return "training step" if self.step == "training_step" else self.step

    def lines(self, ranks: str) -> list[str]:
        """What to print of it."""
        if self.refused:
            return [f"On {ranks} the {self.name} stopped: {self.refused}"]
        verdict = "equals" if self.is_exact else "DIFFERS FROM"
        lines = [f"One {self.name} on {ranks} {verdict} that of one process:"]
        what, kind = "values    ", "outputs and logged values"
        if self.step == "training_step":
            what, kind = "gradients ", "parameters and buffers"
            difference = f"relative difference {self.loss_difference:.1e}"
            lines += [f"  loss       {self.loss:.6g}, {difference}"]
        for name, difference in list(self.differences.items())[:1]:
            lines += [
                f"  {what} of {len(self.differences)} {kind}, relative difference at most "
                f"{difference:.1e} ({name})"
            ]
        if not self.differences:
            lines += ["  it returns and logs nothing to compare"]
        if self.rounding:
            lines += [
                f"  These numbers are from float64, since {self.rounding:.1e} in the module's own "
                "precision left a doubt."
            ]
        if not self.is_exact:
            lines += [
                f"  More than {self.tolerance:.0e} is not rounding. Random numbers other than "
                "torch's dropout, or code that looks at one rank's part, can be the cause."
            ]
        return lines


@dataclass
class Check:
    """What a check found; `print` it.

    Attributes:
        domain: Ranks along each split dim.
        training: What the training step showed.
        evaluation: What the validation, test and predict steps showed, by name.
        not_rehearsed: Why a step of the module was not rehearsed, by name.
    """

    domain: tuple[int, ...]
    training: StepCheck
    evaluation: dict[str, StepCheck] = field(default_factory=dict[str, StepCheck])
    not_rehearsed: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def steps(self) -> list[StepCheck]:
        """All that were rehearsed."""
        return [self.training, *self.evaluation.values()]

    @property
    def refused(self) -> str:
        """The sentence with which the first step stopped that did, or nothing."""
        return next((step.refused for step in self.steps if step.refused), "")

    @property
    def gathered(self) -> list[str]:
        """Functions without a rule for split tensors, of all steps."""
        return list(dict.fromkeys(name for step in self.steps for name in step.gathered))

    @property
    def is_split(self) -> bool:
        """Whether any entry of the training batch was split."""
        return bool(self.training.split.split)

    @property
    def is_exact(self) -> bool:
        """Whether all steps ran, and gave the numbers of one process."""
        return all(step.is_exact for step in self.steps)

    @property
    def is_supported(self) -> bool:
        """Whether they did so on split batches, and without gathering."""
        return self.is_exact and self.is_split and not self.gathered

    def __str__(self) -> str:
        ranks = f"{'x'.join(map(str, self.domain))} ranks"
        count = torch.Size(self.domain).numel()
        lines = [str(self.training.split)] if self.is_split or not self.refused else []
        if not self.is_split and not self.refused:
            lines += [f"NOTHING WAS TRIED SPLIT: {self.training.split.advice(count)}"]
        for step in self.steps:
            if step.gathered:
                lines += [
                    f"Without a rule for split tensors, computed on gathered ones in {step.step}:",
                    *(f"  {name}" for name in step.gathered),
                    *(f"With allow_function({n}) {what}." for n, what in step.functions.items()),
                ]
            lines += step.lines(ranks)
        lines += [f"{step} was not rehearsed: {why}." for step, why in self.not_rehearsed.items()]
        if self.is_exact and self.gathered:
            lines += [
                "It is exact, but gathering costs memory and traffic: train inside "
                "`with lightning_shard.allow_gather():`, or register rules (docs/autograd.md)."
            ]
        return "\n".join(lines)


def check(
    module: LightningModule,
    data: Data,
    domain_parallel_size: int | Sequence[int] = 2,
    shard_dims: ShardDims = None,
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
        trainer: Arguments of the Trainer, such as `precision="64-true"`.

    Returns:
        What was found. Functions without a rule are all named, and not only the first one.
    """
    sizes = domain_parallel_size
    domain = (sizes,) if isinstance(sizes, int) else tuple(sizes)
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
