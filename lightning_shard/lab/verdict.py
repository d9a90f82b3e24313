"""Says how steps on several ranks compare with those of one process."""

from dataclasses import dataclass, field

import torch

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
