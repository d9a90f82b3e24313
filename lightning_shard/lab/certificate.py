"""What a certificate says, and how it is written: as Markdown, JSON and a picture."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_shard.lab.course import Mesh
from lightning_shard.lab.culprit import Culprit
from lightning_shard.trainer.report.chart import chart, missing

NAME = "certificate"
# what differs on several data replicas in DDP, too, by a word of the culprit
OF_REPLICAS = {
    "dropout": "Data replicas draw random numbers of their own, as in DDP",
    "BatchNorm": "Each data replica has statistics of its own samples, as in DDP",
}


@dataclass
class Comparison:
    """How a run on a mesh compares with one process, in one precision.

    Attributes:
        mesh: Data replicas, and the ranks along each split dim.
        precision: Of the Trainer.
        losses: The relative difference of the loss in each step.
        weights: The relative difference of all parameters and buffers after each step.
        bounds: What rounding explains in each step.
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
        """The first step with a difference beyond rounding."""
        steps = zip(self.losses, self.weights, self.bounds, strict=True)
        beyond = (n for n, (loss, weight, bound) in enumerate(steps) if not loss <= bound >= weight)
        return next(beyond, None)

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains all of it."""
        return not self.failed and self.first_beyond is None

    @property
    def ranks(self) -> str:
        return "x".join(map(str, self.mesh))


@dataclass
class Certificate:
    """What `certify` found; `print` it, or `save` it.

    Attributes:
        facts: Versions, seeds, the config's hash and the like, by name.
        rounding: By precision, the differences in weights that one rounding of each first weight
            makes in one process.
        comparisons: Of each mesh in each precision.
        not_run: Why a precision was not run, by precision.
        culprit: Where the first mesh differs that does.
        culprit_on: The mesh and the precision of that.
    """

    facts: dict[str, str]
    rounding: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    comparisons: list[Comparison] = field(default_factory=list[Comparison])
    not_run: dict[str, str] = field(default_factory=dict[str, str])
    culprit: Culprit | None = None
    culprit_on: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether every mesh trained as one process, but for rounding."""
        return bool(self.comparisons) and all(each.is_equal for each in self.comparisons)

    def __str__(self) -> str:
        return self.markdown()

    def markdown(self, picture: str = "") -> str:
        """The certificate as a page.

        Args:
            picture: The file of the picture, if there is one.
        """
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
        if picture:
            lines += ["", f"![Differences by step]({picture})"]
        lines += ["", "| | |", "| --- | --- |"]
        lines += [f"| {name} | {value} |" for name, value in self.facts.items()]
        return "\n".join(lines) + "\n"

    def picture(self) -> str:
        """The differences in weights by step, as SVG; those that are 0 have no point."""
        lines = {f"{each.ranks}, {each.precision}": each.weights for each in self.comparisons}
        lines |= {f"one rounding, {name}": values for name, values in self.rounding.items()}
        points = {
            name: [(step + 1.0, value) for step, value in enumerate(values) if value > 0]
            for name, values in lines.items()
        }
        drawn = chart(points, "step", "relative difference of the weights")
        return drawn or '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"/>'

    def save(self, folder: str | Path) -> Path:
        """Write `certificate.md`, `.json` and `.svg` to a folder, such as that of a checkpoint.

        Without matplotlib there is no `.svg`, and the page says so.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        sentence = missing()
        if not sentence:
            (path / f"{NAME}.svg").write_text(self.picture(), encoding="utf-8")
        page = self.markdown("" if sentence else f"{NAME}.svg")
        page += f"\n{sentence}\n" if sentence else ""
        (path / f"{NAME}.md").write_text(page, encoding="utf-8")
        text = json.dumps({"is_equal": self.is_equal, **_plain(asdict(self))}, indent=1)
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
    """Numbers that JSON does not have become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
