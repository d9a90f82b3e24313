"""Finds the first module and function whose output differs between two runs of a module."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_shard.lab.differences import difference, differences, norm_of_all
from lightning_shard.lab.outputs import Output
from lightning_shard.lab.record import Inspection, Record, record
from lightning_shard.lab.run import Task


@dataclass(frozen=True)
class Culprit:
    """The place where a run on a mesh leaves that of one process.

    Attributes:
        step: The first step with a difference that rounding does not explain.
        module: The module whose output differs first; "" where that is the step itself.
        kind: The class of that module.
        function: The function of torch that it calls, and whose output differs first; "" where
            all of them agree.
        difference: The relative difference of that output.
        backward: True if all outputs of modules agree, and gradients differ.
        buffer: The buffer of the module that differs, where outputs and gradients agree.
        optimizer: True if all of these agree, and weights differ after the optimizer's step.
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
        return f"step {self.step}: {self.place}"

    @property
    def place(self) -> str:
        """The place without the step."""
        where = f"module {self.module} ({self.kind})" if self.module else "the step itself"
        if self.backward:
            return f"all outputs agree, and gradients differ from {where} on"
        if self.buffer or self.optimizer:
            found = f"the buffer {self.buffer} of {where} differs"
            if self.optimizer:
                found = "weights differ after the optimizer's step"
            return f"all outputs and gradients agree, and {found}"
        what = f"{self.function} in " if self.function else ""
        return f"{what}{where} is the first whose output differs, by {self.difference:.1e}"


def find_culprit(alone: Task, ranks: Task, step: int, tolerance: float) -> Culprit:
    """Run both up to `step` again, and compare what modules give there, then what functions give.

    Args:
        alone: The run of one process.
        ranks: The run on a mesh.
        step: The first step that differs.
        tolerance: The relative difference that rounding explains in it.
    """

    def both(module: str | None) -> tuple[Record, Record]:
        inspection = Inspection(step, outputs=True, module=module)
        tasks = (replace(t, batches=t.batches[: step + 1]) for t in (alone, ranks))
        expected, found = (record(task, inspection) for task in tasks)
        return expected, found

    replicas = ranks.mesh[0]
    expected, found = both(None)
    at, difference = _first_that_differs(expected.outputs, found.outputs, tolerance, replicas)
    output = Output("") if at is None else expected.outputs[at]
    of_step = both(output.name)
    functions = of_step[0].outputs
    inner, gap = _first_that_differs(functions, of_step[1].outputs, tolerance, replicas)
    if inner is not None:
        return Culprit(step, output.name, output.kind, functions[inner].name, gap)
    if at is None:
        return _culprit_behind_outputs(expected, found, step, tolerance)
    return Culprit(step, output.name, output.kind, difference=difference)


def _culprit_behind_outputs(
    expected: Record, found: Record, step: int, tolerance: float
) -> Culprit:
    """Find the first difference in gradients, buffers or weights, where all outputs agree."""
    kinds = {output.name: output.kind for output in expected.outputs}
    if (name := _module_of_gradients(expected, found, tolerance)) is not None:
        return Culprit(step, name, kinds.get(name, ""), backward=True)
    gaps = differences(found.buffers, expected.buffers)
    if wrong := [name for name, gap in gaps.items() if not gap <= tolerance]:
        name, _, buffer = wrong[0].rpartition(".")
        return Culprit(step, name, kinds.get(name, ""), difference=gaps[wrong[0]], buffer=buffer)
    return Culprit(step, optimizer=True)


def _first_that_differs(
    expected: Sequence[Output], found: Sequence[Output], tolerance: float, replicas: int
) -> tuple[int | None, float]:
    """Return the number of the first call whose output differs, and by how much."""
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one.name != other.name:  # from here on they cannot be compared
            break
        pairs = zip(one.values, other.values, strict=True)
        worst = max((_gap_of_output(*pair, replicas) for pair in pairs), default=0.0)
        if not worst <= tolerance:
            return number, worst
    return None, 0.0


def _gap_of_output(expected: Tensor, found: Tensor, replicas: int) -> float:
    """Return the relative difference on the samples of replica 0.

    It is 0 for a value without a dim of samples, such as a mean, which cannot be cut.
    """
    if replicas > 1:
        if not expected.ndim or len(expected) != replicas * len(found):
            return 0.0
        expected = expected[: len(found)]
    return difference(found, expected, 0.0)


def _module_of_gradients(expected: Record, found: Record, tolerance: float) -> str | None:
    """Return the module with differing gradients to which backward comes first."""
    gaps = differences(
        found.gradients, expected.gradients, norm_of_all(expected.gradients.values())
    )
    owners = {name.rpartition(".")[0] for name, gap in gaps.items() if not gap <= tolerance}
    ended = [output.name for output in expected.outputs if output.name in owners]
    return ended[-1] if ended else next(iter(owners), None)
