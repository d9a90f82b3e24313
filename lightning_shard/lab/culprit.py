"""Finds the first module and the first function whose output differs on a mesh."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_shard.lab.course import Course, Look, Task, run
from lightning_shard.lab.differences import differences, norm
from lightning_shard.lab.outputs import Output


@dataclass(frozen=True)
class Culprit:
    """Where a run on a mesh leaves that of one process.

    Attributes:
        step: The first step with a difference that rounding does not explain.
        module: The module whose output differs first; "" where that is the step itself.
        kind: The class of that module.
        function: The function of torch that it calls, and whose output differs first; "" where
            all of them agree.
        difference: Of that output, relative.
        backward: Whether all outputs of modules agree, and gradients differ.
        buffer: Of the module, where outputs and gradients agree and this differs.
        optimizer: Whether all of these agree, and weights differ after the optimizer's step.
    """

    step: int
    module: str = ""
    kind: str = ""
    function: str = ""
    difference: float = 0.0
    backward: bool = False
    buffer: str = ""
    optimizer: bool = False

    def __str__(self) -> str:
        where = f"module {self.module} ({self.kind})" if self.module else "the step itself"
        what = f"step {self.step}: "
        if self.backward:
            return f"{what}all outputs agree, and gradients differ from {where} on"
        if self.buffer or self.optimizer:
            found = f"the buffer {self.buffer} of {where} differs"
            if self.optimizer:
                found = "weights differ after the optimizer's step"
            return f"{what}all outputs and gradients agree, and {found}"
        if self.function:
            what += f"{self.function} in "
        return f"{what}{where} is the first whose output differs, by {self.difference:.1e}"


def find(alone: Task, ranks: Task, step: int, tolerance: float) -> Culprit:
    """Run both up to `step` again, and compare what modules give there, then what functions give.

    Args:
        alone: The run of one process.
        ranks: The run on a mesh.
        step: The first one that differs.
        tolerance: The relative difference that rounding explains in it.
    """

    def both(module: str | None) -> tuple[Course, Course]:
        look = Look(step, module)
        tasks = (replace(t, batches=t.batches[: step + 1], look=look) for t in (alone, ranks))
        expected, found = map(run, tasks)
        return expected, found

    replicas = ranks.mesh[0]
    expected, found = both(None)
    at, difference = _first(expected.outputs, found.outputs, tolerance, replicas)
    output = Output("") if at is None else expected.outputs[at]
    of_step = both(output.name)
    inner, gap = _first(of_step[0].outputs, of_step[1].outputs, tolerance, replicas)
    if inner is not None:
        function = of_step[0].outputs[inner].name
        return Culprit(step, output.name, output.kind, function, gap)
    if at is None:
        return _behind_outputs(expected, found, step, tolerance)
    return Culprit(step, output.name, output.kind, difference=difference)


def _behind_outputs(expected: Course, found: Course, step: int, tolerance: float) -> Culprit:
    """What differs first where all outputs agree."""
    kinds = {output.name: output.kind for output in expected.outputs}
    if (name := _of_gradients(expected, found, tolerance)) is not None:
        return Culprit(step, name, kinds.get(name, ""), backward=True)
    gaps = differences(found.buffers, expected.buffers)
    if wrong := [name for name, gap in gaps.items() if not gap <= tolerance]:
        name, _, buffer = wrong[0].rpartition(".")
        return Culprit(step, name, kinds.get(name, ""), difference=gaps[wrong[0]], buffer=buffer)
    return Culprit(step, optimizer=True)


def _first(
    expected: Sequence[Output], found: Sequence[Output], tolerance: float, replicas: int
) -> tuple[int | None, float]:
    """The number of the first call whose output differs, and by how much."""
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one.name != other.name:  # from here on they cannot be compared
            break
        pairs = zip(one.values, other.values, strict=True)
        worst = max((_gap(*pair, replicas) for pair in pairs), default=0.0)
        if not worst <= tolerance:
            return number, worst
    return None, 0.0


def _gap(expected: Tensor, found: Tensor, replicas: int) -> float:
    """Of the first replica's share; 0 where it cannot be told, as of a mean over samples."""
    if replicas > 1:
        if not expected.ndim or len(expected) != replicas * len(found):
            return 0.0
        expected = expected[: len(found)]
    if expected.shape != found.shape:
        return torch.inf
    gap = torch.where((expected == found) | (expected.isnan() & found.isnan()), 0, found - expected)
    return norm(gap) / max(norm(expected), 1e-30)


def _of_gradients(expected: Course, found: Course, tolerance: float) -> str | None:
    """The module with parameters whose gradients differ, of which backward comes to first."""
    total = norm(torch.tensor([norm(g) for g in expected.gradients.values()]))
    gaps = differences(found.gradients, expected.gradients, total)
    owners = {name.rpartition(".")[0] for name, gap in gaps.items() if not gap <= tolerance}
    order = [output.name for output in expected.outputs]
    ended = [name for name in order if name in owners]
    return ended[-1] if ended else next(iter(owners), None)
