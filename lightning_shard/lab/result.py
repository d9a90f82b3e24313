"""Holds what comparisons of runs found, in words, and writes certificates to files."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_shard.data.atomic import disk_errors
from lightning_shard.lab.culprit import Culprit
from lightning_shard.lab.run import Mesh
from lightning_shard.trainer.split_summary import SplitSummary

NAME = "certificate"
LOSS = "the loss"
# these differ on several data replicas in DDP, too; by a word of the culprit
OF_REPLICAS = {
    "dropout": "Data replicas draw random numbers of their own, as in DDP",
    "BatchNorm": "Each data replica has statistics of its own samples, as in DDP",
}


@dataclass
class StepCheck:
    """The comparison of one step on several ranks with the step in one process.

    Attributes:
        step: The method of the module, such as "validation_step".
        split: The entries of its batch that were split.
        refused: The sentence with which the step stopped, if it did.
        gathered: Functions without a rule for split tensors, by name.
        functions: The effect of `allow_function` on each of them that is a custom autograd
            Function, in words.
        differences: The relative difference of each value, the largest first: gradients and buffers
            of a training step, outputs and logged values of another.
        loss: The loss of a training step in one process; None if the step returned none.
        loss_difference: The relative difference of that loss on several ranks.
        tolerance: The largest difference that rounding explains.
        rounding: The largest difference in the module's own precision, where that left a doubt and
            the comparison was repeated in float64; else 0.
        logged: The relative difference of each value that a training step logged, the largest
            first.
        tolerance_of_logged: The largest of these that rounding explains.
        apart: The relative difference of gradients and buffers of a training step between ranks
            that share each sample.
        apart_in_steps: Sentences of what these ranks compute differently in a training step, with
            which a training stops.
        nan: The values of one process that are NaN, or have it in them.
        unsteady: The values that differ between two runs in one process, too, if any differ.
        culprit: The first place of a training step whose output differs, if the step does.
    """

    step: str
    split: SplitSummary = field(default_factory=SplitSummary)
    refused: str = ""
    gathered: list[str] = field(default_factory=list[str])
    functions: dict[str, str] = field(default_factory=dict[str, str])
    differences: dict[str, float] = field(default_factory=dict[str, float])
    loss: float | None = None
    loss_difference: float = 0.0
    tolerance: float = 0.0
    rounding: float = 0.0
    logged: dict[str, float] = field(default_factory=dict[str, float])
    tolerance_of_logged: float = 0.0
    apart: dict[str, float] = field(default_factory=dict[str, float])
    apart_in_steps: list[str] = field(default_factory=list[str])
    nan: list[str] = field(default_factory=list[str])
    unsteady: frozenset[str] = frozenset()
    culprit: Culprit | None = None

    @property
    def is_training(self) -> bool:
        """True for a training step."""
        return self.step == "training_step"

    @property
    def worst(self) -> float:
        """The largest relative difference of loss, gradients, buffers, and of what is returned."""
        return max([self.loss_difference, *self._compared(self.differences).values()])

    @property
    def not_compared(self) -> list[str]:
        """Values that are only logged, and that one process does not give twice."""
        of_training = [f"logged {name}" for name in self.logged]
        of_others = [name for name in self.differences if not name.startswith("output")]
        only_logged = of_training if self.is_training else of_others
        named = [name for name in only_logged if name in self.unsteady]
        return named if self.is_training or len(named) < len(self.differences) else []

    @property
    def beyond(self) -> frozenset[str]:
        """The names of values whose difference rounding does not explain."""
        values = {LOSS: self.loss_difference, **self.differences}
        values |= {f"{name} of another rank": gap for name, gap in self.apart.items()}
        found = {name for name, gap in values.items() if not gap <= self.tolerance}
        logged = self.logged.items()
        found |= {f"logged {name}" for name, gap in logged if not gap <= self.tolerance_of_logged}
        return frozenset(found.difference(self.not_compared))

    @property
    def is_exact(self) -> bool:
        """True if the step ran, and gave the numbers of one process."""
        return not self.refused and not self.beyond and not self.apart_in_steps

    def _compared(self, values: Mapping[str, float]) -> dict[str, float]:
        left_out = self.not_compared
        return {name: gap for name, gap in values.items() if name not in left_out}

    @property
    def name(self) -> str:
        """The name of the step in a sentence."""
        return "training step" if self.is_training else self.step

    def lines(self, ranks: str) -> list[str]:
        """Return the result as lines of text."""
        if self.refused:
            return [f"On {ranks} the {self.name} stopped: {self.refused}"]
        verdict = "DIFFERS FROM" if self.beyond else "equals"
        lines = [f"One {self.name} on {ranks} {verdict} that of one process:"]
        kind = "parameters and buffers" if self.is_training else "outputs and logged values"
        if self.loss is not None:
            difference = f"relative difference {self.loss_difference:.1e}"
            lines += [f"  loss       {self.loss:.6g}, {difference}"]
        named = "gradients" if self.is_training else "values"
        lines += _of_values(named, kind, self._compared(self.differences))
        if not self.differences:
            lines += ["  it returns and logs nothing to compare"]
        if not max(self.logged.values(), default=0.0) <= self.tolerance_of_logged:
            lines += _of_values("logged", "values", self.logged)
        if not max(self.apart.values(), default=0.0) <= self.tolerance:
            name = max(self.apart, key=lambda name: self.apart[name])
            lines += [
                f"  The ranks differ from each other by up to {self.apart[name]:.1e} ({name}), and "
                "would go on with different numbers."
            ]
        if self.nan:
            others = f" and {more} more" if (more := len(self.nan) - 1) else ""
            lines += [f"  NaN in one process, too: {self.nan[0]}{others}."]
        if left_out := self.not_compared:
            lines += [f"  Two runs in one process differ, too, in {', '.join(left_out)}."]
        if self.rounding:
            lines += [
                f"  These numbers are from float64, since {self.rounding:.1e} in the module's own "
                "precision left a doubt."
            ]
        lines += [f"  A training stops: {sentence}" for sentence in self.apart_in_steps]
        if self.beyond:
            lines += [f"  More than {self.tolerance:.0e} is not rounding. {self._reason}"]
        if self.culprit is not None:
            lines += [f"  Where: {self.culprit.place}."]
        return lines

    @property
    def _reason(self) -> str:
        if self.unsteady.difference(self.not_compared):
            return (
                "Two runs in one process differ, too: the step depends on the time, on a file, or "
                "on random numbers that no seed of the run decides."
            )
        return (
            "Random numbers other than torch's dropout, or code that looks at one rank's part, "
            "can be the cause."
        )


def _of_values(named: str, kind: str, values: Mapping[str, float]) -> list[str]:
    """Name the largest difference, which comes first."""
    return [
        f"  {named:10} of {len(values)} {kind}, relative difference at most {gap:.1e} ({name})"
        for name, gap in list(values.items())[:1]
    ]


@dataclass
class Check:
    """The result of `check`; `print` it.

    Attributes:
        mesh: Data replicas, and the ranks along each split dim.
        training: The result of the training step; None if the module has none.
        evaluation: The results of the validation, test and predict steps, by name.
        not_rehearsed: Reasons for which steps of the module were not rehearsed, by name.
    """

    mesh: Mesh
    training: StepCheck | None
    evaluation: dict[str, StepCheck] = field(default_factory=dict[str, StepCheck])
    not_rehearsed: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def domain(self) -> tuple[int, ...]:
        """The ranks along each split dim."""
        return self.mesh[1:]

    @property
    def steps(self) -> list[StepCheck]:
        """The results of all steps that were rehearsed."""
        training = [] if self.training is None else [self.training]
        return [*training, *self.evaluation.values()]

    @property
    def refused(self) -> str:
        """The sentence with which the first step stopped that did, or nothing."""
        return next((step.refused for step in self.steps if step.refused), "")

    @property
    def gathered(self) -> list[str]:
        """Functions without a rule for split tensors, of all steps."""
        return list(dict.fromkeys(name for step in self.steps for name in step.gathered))

    @property
    def split(self) -> SplitSummary:
        """The entries of the batch that were split; of training, if the module trains."""
        return self.steps[0].split if self.steps else SplitSummary()

    @property
    def is_split(self) -> bool:
        """True if any of these entries was."""
        return bool(self.split.split)

    @property
    def is_exact(self) -> bool:
        """True if all steps ran, and gave the numbers of one process."""
        return all(step.is_exact for step in self.steps)

    @property
    def is_supported(self) -> bool:
        """True if all steps were exact on split batches, and without gathering."""
        return self.is_exact and self.is_split and not self.gathered

    def __str__(self) -> str:
        ranks = f"{'x'.join(map(str, self.domain))} ranks"
        if self.mesh[0] > 1:
            ranks = f"{self.mesh[0]} data replicas of {ranks}"
        count = math.prod(self.domain)
        lines = [str(self.split)] if self.is_split or (self.steps and not self.refused) else []
        if not self.is_split and not self.refused and self.steps:
            lines += [f"NOTHING WAS TRIED SPLIT: {self.split.advice(count)}"]
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
                "`with lightning_shard.allow_gather():`, or register rules (docs/refused.md)."
            ]
        return "\n".join(lines)


@dataclass
class Comparison:
    """The result of a run on a mesh in one precision, compared with one process.

    Attributes:
        mesh: Data replicas, and the ranks along each split dim.
        precision: The precision of the Trainer.
        losses: The relative difference of the loss in each step.
        weights: The relative difference of all parameters and buffers after each step.
        bounds: The difference that rounding explains in each step.
        failed: The error with which the run ended, if it did.
    """

    mesh: Mesh
    precision: str
    losses: list[float] = field(default_factory=list[float])
    weights: list[float] = field(default_factory=list[float])
    bounds: list[float] = field(default_factory=list[float])
    failed: str = ""

    @property
    def first_beyond(self) -> int | None:
        """The first step with a difference beyond rounding; None if there is none."""
        steps = zip(self.losses, self.weights, self.bounds, strict=True)
        beyond = (n for n, (loss, weight, bound) in enumerate(steps) if not loss <= bound >= weight)
        return next(beyond, None)

    @property
    def is_equal(self) -> bool:
        """True if the run ended, and rounding explains all differences."""
        return not self.failed and self.first_beyond is None

    @property
    def ranks(self) -> str:
        """The mesh as text, such as "2x2"."""
        return "x".join(map(str, self.mesh))


@dataclass
class Certificate:
    """The result of `certify`; `print` it, or `save` it.

    Attributes:
        facts: Versions, seeds, the config's hash and the like, by name.
        rounding: By precision, the differences in weights that one rounding of each first weight
            makes in one process.
        comparisons: The results of each mesh in each precision.
        not_run: Reasons for which a precision was not run, by precision.
        culprit: The place where the first mesh differs that does; None if all are equal.
        culprit_on: The mesh and the precision of that place.
    """

    facts: dict[str, str]
    rounding: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    comparisons: list[Comparison] = field(default_factory=list[Comparison])
    not_run: dict[str, str] = field(default_factory=dict[str, str])
    culprit: Culprit | None = None
    culprit_on: str = ""

    @property
    def is_equal(self) -> bool:
        """True if every mesh trained as one process, but for rounding."""
        return bool(self.comparisons) and all(each.is_equal for each in self.comparisons)

    def __str__(self) -> str:
        return self.markdown()

    def markdown(self) -> str:
        """Return the certificate as a page."""
        verdict = "equals" if self.is_equal else "DIFFERS FROM"
        meshes = ", ".join(dict.fromkeys(each.ranks for each in self.comparisons))
        steps = max((len(each.losses) for each in self.comparisons), default=0)
        lines = [
            "# Certificate of equality",
            "",
            f"Training on the meshes {meshes} {verdict} training in one process, over {steps} "
            "steps.",
            "",
            "| mesh | precision | loss | weights | rounding explains | verdict |",
            "| --- | --- | --- | --- | --- | --- |",
            *map(_row, self.comparisons),
            "",
            "The largest relative differences of any step, and what rounding explains in that of "
            "the last: a hundred times the difference of one process whose first weights are each "
            "moved to the number beside them, or what sums in another order give at once.",
        ]
        if self.culprit is not None:
            lines += ["", f"First difference, on {self.culprit_on}: {self.culprit}."]
            lines += [f"{why}." for word, why in OF_REPLICAS.items() if word in str(self.culprit)]
        lines += [f"{precision} was not run: {why}" for precision, why in self.not_run.items()]
        lines += ["", "| | |", "| --- | --- |"]
        lines += [f"| {name} | {value} |" for name, value in self.facts.items()]
        return "\n".join(lines) + "\n"

    def save(self, folder: str | Path) -> Path:
        """Write `certificate.md` and `.json` to a folder, such as that of a checkpoint."""
        path = Path(folder)
        text = json.dumps({"is_equal": self.is_equal, **_plain(asdict(self))}, indent=1)
        with disk_errors(path / f"{NAME}.md"):
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{NAME}.md").write_text(self.markdown(), encoding="utf-8")
            (path / f"{NAME}.json").write_text(text + "\n", encoding="utf-8")
        return path / f"{NAME}.md"


def _row(each: Comparison) -> str:
    if each.failed:
        return f"| {each.ranks} | {each.precision} | | | | failed: {each.failed} |"
    numbers = (max(each.losses), max(each.weights), each.bounds[-1])
    shown = " | ".join(f"{number:.1e}" for number in numbers)
    at = each.first_beyond
    verdict = "equal" if at is None else f"differs from step {at} on"
    return f"| {each.ranks} | {each.precision} | {shown} | {verdict} |"


def _plain(value: Any) -> Any:
    """Replace numbers that JSON does not have by text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
