"""Certifies that training on meshes gives what training in one process gives."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_shard.data.split import ShardDims
from lightning_shard.lab.batches import Data, batches_in_turn
from lightning_shard.lab.certificate import Certificate, Comparison
from lightning_shard.lab.course import Course, Mesh, Task, run, samples_of
from lightning_shard.lab.culprit import find
from lightning_shard.lab.differences import NARROW, TOLERANCE, norm

MESHES = ((1, 1), (1, 2), (2, 2), (1, 4))
DOUBLE = "64-true"
GROWTH = 100.0  # how much more than one rounding of each first weight is still rounding


def certify(
    module: LightningModule,
    data: Data,
    meshes: Sequence[Sequence[int]] = MESHES,
    steps: int = 50,
    shard_dims: ShardDims = None,
    *,
    simulated: bool = False,
    facts: Mapping[str, str] | None = None,
    **trainer: Any,
) -> Certificate:
    """Train some steps on each mesh and in one process, and compare losses and weights.

    All runs have the same batches, first weights and random numbers, on the CPU of this machine.
    They are made in float64, where rounding hides nothing, and in the precision of `trainer`. Where
    one differs by more than rounding explains, its first step that does is run again, and the first
    module and function are found whose output differs.

    Args:
        module: An ordinary LightningModule, which stays as it is.
        data: A data module, or a DataLoader of training batches, each of which the data replicas
            share.
        meshes: Of each the data replicas, and then the ranks along each split dim.
        steps: How many batches are trained on.
        shard_dims: As for `HybridShardStrategy`.
        simulated: Whether ranks are those of `simulate`, instead of processes.
        facts: What else the certificate is to name.
        trainer: Arguments of the Trainer, such as `precision="bf16-mixed"`.

    Raises:
        ValueError: `steps` is smaller than 1, a mesh has no domain, or its replicas cannot share a
            batch equally.
        torch.multiprocessing.ProcessRaisedException: The module does not train in one process.
    """
    if steps < 1:
        raise ValueError(f"steps must be 1 or more; got {steps}.")
    batches = batches_in_turn(data, steps)
    own = data if isinstance(data, LightningDataModule) else None
    sizes = [tuple(mesh) for mesh in meshes]
    for mesh in sizes:
        _check(mesh, batches)
    precision = str(trainer.get("precision", "32-true"))
    told = _facts(batches, simulated) | dict(facts or {})
    found = Certificate(told)
    task = Task(module, own, batches, (), shard_dims, trainer, simulated)
    for each in dict.fromkeys((DOUBLE, precision)):
        _compare(found, replace(task, trainer=trainer | {"precision": each}), sizes, each)
    if not found.comparisons:
        raise ValueError(f"nothing was compared: {'; '.join(found.not_run.values())}")
    return found


def _compare(found: Certificate, task: Task, meshes: Sequence[Mesh], precision: str) -> None:
    """Run all meshes in one precision."""
    try:
        alone = run(task)
    except ProcessRaisedException as error:  # not every module computes in float64
        if precision != DOUBLE:
            raise
        found.not_run[precision] = _last_line(error)
        return
    nudged = _differences(run(replace(task, nudged=True)), alone)
    worst = [max(pair) for pair in zip(*nudged, strict=True)]
    tolerance = _tolerance(alone)
    bounds = [max(tolerance, GROWTH * each) for each in accumulate(worst, max)]
    found.rounding[precision] = nudged[1]
    for mesh in meshes:
        compared = Comparison(mesh, precision, bounds=bounds)
        found.comparisons.append(compared)
        try:
            compared.losses, compared.weights = _differences(run(replace(task, mesh=mesh)), alone)
        except ProcessRaisedException as error:
            compared.failed = _last_line(error)
            continue
        step = compared.first_beyond
        if step is not None and found.culprit is None:
            found.culprit = find(task, replace(task, mesh=mesh), step, bounds[step])
            found.culprit_on = f"{compared.ranks} in {precision}"


def _differences(course: Course, alone: Course) -> tuple[list[float], list[float]]:
    """The relative differences of losses, and of weights, in each step."""
    losses = [
        _relative(abs(one - other), abs(other))
        for one, other in zip(course.losses, alone.losses, strict=True)
    ]
    weights: list[float] = []
    for one, other in zip(course.weights, alone.weights, strict=True):
        names = [name for name, value in other.items() if _is_number(value)]
        gap = torch.tensor([norm(one[name] - other[name]) for name in names])
        weights.append(_relative(norm(gap), norm(torch.tensor([norm(other[n]) for n in names]))))
    return losses, weights


def _relative(gap: float, size: float) -> float:
    return gap / max(size, 1e-30) if gap == gap else torch.inf  # NaN is no number


def _is_number(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _tolerance(course: Course) -> float:
    """What sums in another order give at once, in the dtype of the weights."""
    dtypes = {value.dtype for value in course.weights[0].values() if value.is_floating_point()}
    return max((TOLERANCE.get(dtype, NARROW) for dtype in dtypes), default=TOLERANCE[torch.float32])


def _check(mesh: Mesh, batches: Sequence[Any]) -> None:
    if len(mesh) < 2 or min(mesh) < 1:
        raise ValueError(
            f"a mesh is data replicas x ranks of a domain, such as (2, 2); got {mesh}."
        )
    unequal = next((n for n in map(samples_of, batches) if n % mesh[0]), None)
    if unequal is not None:
        raise ValueError(
            f"the {mesh[0]} data replicas of the mesh {'x'.join(map(str, mesh))} cannot share a "
            f"batch of {unequal} samples equally; choose another batch size, or another mesh."
        )


def _facts(batches: Sequence[Any], simulated: bool) -> dict[str, str]:
    """What a reader needs to make the certificate anew."""
    versions = {name: importlib.metadata.version(name) for name in ("lightning-shard", "lightning")}
    return {
        **versions,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"CPU, {platform.machine()}",
        "ranks": "simulated in one process" if simulated else "processes, gloo",
        "seed": "0 for batches and random numbers, 1 for the roundings",
        "batch": f"{samples_of(batches[0])} samples",
    }


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1]
