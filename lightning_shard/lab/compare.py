"""Compares runs of a module on a mesh with the same run in one process.

`check` compares one step of each kind, `certify` some steps of training. Both record a run with
`record` and compare what it gave. What differs by more than rounding is looked for again in the
first step that differs, module by module and then function by function (`find_culprit`).
"""

import importlib.metadata
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_shard.data.split import ShardDims
from lightning_shard.fsdp.options import Sharding
from lightning_shard.lab.batches import (
    STEPS,
    Data,
    NotRehearsedError,
    Stage,
    batches_in_turn,
    first_batches,
    has_own_loaders,
    stages_of,
)
from lightning_shard.lab.culprit import find_culprit
from lightning_shard.lab.differences import (
    NARROW,
    Value,
    difference,
    difference_of_all,
    differences,
    norm_of_all,
    tolerance_of,
)
from lightning_shard.lab.record import Inspection, Record, record
from lightning_shard.lab.result import (
    LOSS,
    Certificate,
    Check,
    Comparison,
    StepCheck,
)
from lightning_shard.lab.run import Mesh, Task, as_mesh, samples_of, trainer_options
from lightning_shard.lightning import LightningDataModule, LightningModule, is_overridden

MESHES = ((1, 1), (1, 2), (2, 2), (1, 4))
DOUBLE = "64-true"
GROWTH = 100.0  # how much more than one rounding of each first weight is still rounding


def check(
    module: LightningModule,
    data: Data,
    mesh: int | str | Sequence[int] = 2,
    shard_dims: ShardDims = None,
    *,
    simulated: bool = False,
    sharding: Sharding = "auto",
    **trainer: Any,
) -> Check:
    """Run each step in one process and on a mesh of ranks on this machine, and compare.

    The steps are those that the module defines: training, validation, test and prediction.

    Args:
        module: An ordinary LightningModule, which stays as it is. Try a small one: all of it is
            computed on the CPU of this machine.
        data: A data module, or a DataLoader of training batches, whose first batch then serves
            the other steps too. Data replicas share each batch.
        mesh: Data replicas and the ranks along each split dim, as `(1, 2, 2)` or "1x2x2"; a number
            of ranks is that of one replica.
        shard_dims: The dims that are split, as for `HybridShardStrategy`.
        simulated: True if the ranks are simulated in this process (`simulate`), which is quicker,
            and allows for many of them, instead of processes.
        sharding: The mode of `ShardingOptions`.
        trainer: Arguments of the Trainer, such as `precision="64-true"`. In a precision of 16 bits
            a small fault hides in rounding, so the step is compared in float64, too.

    Returns:
        The result of each step. Functions without a rule are all named, and not only the first one.

    Raises:
        ValueError: The mesh is none, or its replicas cannot share a batch equally.
        TypeError: An argument is neither one of this function nor one of the Trainer.
        torch.multiprocessing.ProcessRaisedException: The module does not train.
    """
    options = trainer_options(check, trainer)
    strategy = {"shard_dims": shard_dims, "sharding": sharding}
    task = _task(module, data, strategy, options, simulated=simulated)
    sizes = as_mesh(mesh)
    others = stages_of(module)
    trains = is_overridden("training_step", module) or not others
    found = Check(sizes, _check_step(data, task, sizes, "fit") if trains else None)
    for stage in others:
        step = STEPS[stage][0]
        try:
            found.evaluation[step] = _check_step(data, task, sizes, stage)
        except NotRehearsedError as reason:
            found.not_rehearsed[step] = str(reason)
    return found


def certify(
    module: LightningModule,
    data: Data,
    meshes: Sequence[int | str | Sequence[int]] = MESHES,
    steps: int = 50,
    shard_dims: ShardDims = None,
    *,
    simulated: bool = False,
    sharding: Sharding = "auto",
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
        meshes: Meshes, each in the form that `check` takes.
        steps: Number of batches that are trained on.
        shard_dims: The dims that are split, as for `HybridShardStrategy`.
        simulated: True for ranks of `simulate`, instead of processes.
        sharding: The mode of `ShardingOptions`.
        facts: Further facts that the certificate is to name.
        trainer: Arguments of the Trainer, such as `precision="bf16-mixed"`.

    Raises:
        ValueError: `steps` is smaller than 1, a mesh has no domain, or its replicas cannot share a
            batch equally. Or the loss of one process is NaN.
        TypeError: An argument is neither one of this function nor one of the Trainer.
        torch.multiprocessing.ProcessRaisedException: The module does not train in one process.
    """
    options = trainer_options(certify, trainer)
    if steps < 1:
        raise ValueError(f"steps must be 1 or more; got {steps}.")
    batches, sizes = batches_in_turn(data, steps), list(map(as_mesh, meshes))
    for mesh in sizes:
        _refuse_unequal_shares(batches, mesh)
    found = Certificate(_facts(batches, simulated=simulated) | dict(facts or {}))
    strategy = {"shard_dims": shard_dims, "sharding": sharding}
    task = _task(module, data, strategy, options, simulated=simulated)
    task = replace(task, batches=batches)
    for precision in dict.fromkeys((DOUBLE, str(options.get("precision", "32-true")))):
        of_precision = replace(task, trainer=options | {"precision": precision})
        _certify_in(found, of_precision, sizes, precision)
    if not found.comparisons:
        raise ValueError(f"nothing was compared: {'; '.join(found.not_run.values())}")
    return found


def _task(
    module: LightningModule,
    data: Data,
    strategy: dict[str, Any],
    trainer: dict[str, Any],
    *,
    simulated: bool,
) -> Task:
    """Return the task of one process, without batches."""
    own = data if isinstance(data, LightningDataModule) else None
    strategy = {**strategy, "exact_random": True}
    return Task(module, own, [], strategy=strategy, trainer=trainer, simulated=simulated)


def _refuse_unequal_shares(batches: Sequence[Any], mesh: Mesh) -> None:
    unequal = next((n for n in map(samples_of, batches) if n % mesh[0]), None)
    if unequal is not None:
        raise ValueError(
            f"the {mesh[0]} data replicas of the mesh {'x'.join(map(str, mesh))} cannot share a "
            f"batch of {unequal} samples equally; choose another batch size, or another mesh."
        )


# One step of each kind


def _check_step(data: Data, task: Task, mesh: Mesh, stage: Stage) -> StepCheck:
    task = replace(task, stage=stage, batches=first_batches(task.module, data, stage))
    try:
        _refuse_unequal_shares(task.batches, mesh)
    except ValueError as error:
        if stage == "fit":
            raise
        raise NotRehearsedError(str(error).rstrip(".")) from error

    def compare(task: Task) -> StepCheck:
        alone, ranks = _record_alone(task, data), replace(task, mesh=mesh)
        first = record(ranks, Inspection())
        step = _compared(alone, first, stage)
        if not step.refused and not step.is_exact:
            step.unsteady = _compared(alone, _record_alone(task, data), stage).beyond

        def again(allowed: list[str]) -> tuple[StepCheck, list[str]]:
            other = record(ranks, Inspection(), allowed=allowed)
            return _compared(alone, other, stage), other.functions

        step.functions = _with_functions_allowed(first.functions, again)
        return step

    def place(task: Task, step: StepCheck) -> StepCheck:
        if stage == "fit" and step.beyond & {LOSS, *step.differences}:
            found = find_culprit(task, replace(task, mesh=mesh), 0, step.tolerance)
            step.culprit = None if found.optimizer else found
        return step

    found = compare(task)
    narrow = "16" in str(task.trainer.get("precision"))  # a small fault hides in its rounding
    if found.refused or not (found.beyond or narrow):
        return found
    beyond = not found.worst <= NARROW or found.unsteady
    if beyond if narrow else "precision" in task.trainer:
        return place(task, found)
    wide = replace(task, trainer={**task.trainer, "precision": DOUBLE})
    try:  # sums that nearly cancel differ by more than any tolerance for float32
        double = compare(wide)
    except ProcessRaisedException:  # not every module computes in float64
        return place(task, found)
    double.rounding = found.worst
    return double if double.is_exact else place(wide, double)


def _record_alone(task: Task, data: Data) -> Record:
    try:
        return record(task, Inspection())
    except ProcessRaisedException as error:
        if task.stage == "fit" or has_own_loaders(task.module, data, task.stage):
            raise
        reason = f"in one process it fails on a training batch, {_last_line(error)}"
        raise NotRehearsedError(reason) from error


def _compared(alone: Record, ranks: Record, stage: Stage) -> StepCheck:
    """Compare one step in one process with the same on a mesh."""
    found = StepCheck(STEPS[stage][0], ranks.split, ranks.refused, ranks.gathered)
    if found.refused:
        return found
    (values,) = alone.values
    logged, tolerance = differences(_joined(ranks.values, values), values), tolerance_of(values)
    if stage == "fit":
        found.loss = alone.losses[0] if alone.has_loss else None
        found.loss_difference = difference(ranks.losses[0], alone.losses[0], 0.0)
        expected = alone.gradients | alone.buffers
        found.differences = differences(
            ranks.gradients | ranks.buffers, expected, norm_of_all(expected.values())
        )
        found.tolerance = tolerance_of(expected)
        found.apart, found.apart_in_steps = ranks.apart, ranks.apart_in_steps
        found.logged, found.tolerance_of_logged = logged, tolerance
    else:
        expected = values
        found.differences, found.tolerance = logged, tolerance
    found.nan = [LOSS] if found.loss is not None and math.isnan(found.loss) else []
    found.nan += [name for name, value in expected.items() if _has_nan(value)]
    return found


def _has_nan(value: Value) -> bool:
    return not isinstance(value, str) and bool(torch.as_tensor(value, device="cpu").isnan().any())


def _joined(replicas: Sequence[Mapping[str, Value]], expected: Mapping[str, Value]) -> Any:
    """Put the values of data replicas together: samples in their order, and means over samples."""
    if len(replicas) == 1:
        return replicas[0]

    def join(name: str) -> Value:
        parts: list[Any] = [values[name] for values in replicas]
        whole = expected.get(name)
        if isinstance(parts[0], str) or len(set(map(type, parts))) > 1:
            return parts[0] if all(part == parts[0] for part in parts) else str(parts)
        if isinstance(whole, Tensor) and isinstance(parts[0], Tensor):
            samples = sum(len(part) for part in parts) if parts[0].ndim else -1
            if whole.ndim and len(whole) == samples:
                return torch.cat(parts)
        return sum(parts) / len(parts)

    common = [name for name in replicas[0] if all(name in values for values in replicas)]
    return {name: join(name) for name in common}


def _with_functions_allowed(
    functions: list[str], again: Callable[[list[str]], tuple[StepCheck, list[str]]]
) -> dict[str, str]:
    """Try `allow_function` for each custom autograd Function, and return in words what it does.

    Behind one that is gathered others do not meet split tensors, so those that agree stay allowed.

    Args:
        functions: The names of those that were gathered.
        again: Runs the step with Functions allowed; returns how it compares, and the names of
            further Functions that it gathered.
    """
    words: dict[str, str] = {}
    agreed: list[str] = []
    waiting = list(functions)
    while waiting:
        name = waiting.pop(0)
        try:
            step, others = again([*agreed, name])
        except ProcessRaisedException as error:  # its forward or its backward
            words[name] = f"it fails: {_last_line(error)}"
            continue
        words[name] = _agreement(step)
        if step.is_exact:
            agreed.append(name)
            waiting += [new for new in others if new not in {*words, *waiting}]
    return words


def _agreement(step: StepCheck) -> str:
    if step.refused:
        return f"it stops: {step.refused}"
    if step.is_exact:
        return "value and gradient agree" if step.step == "training_step" else "its values agree"
    if step.loss_difference > step.tolerance or step.step != "training_step":
        return f"its value differs, by {step.loss_difference or step.worst:.1e} of the whole"
    return f"its value agrees, and gradients differ by up to {step.worst:.1e}"


# Some steps of training


def _certify_in(found: Certificate, task: Task, meshes: Sequence[Mesh], precision: str) -> None:
    """Run one process and all meshes in one precision."""
    try:
        alone = record(task)
    except ProcessRaisedException as error:  # not every module computes in float64
        if precision != DOUBLE:
            raise
        found.not_run[precision] = _last_line(error)
        return
    if alone.has_loss and any(map(math.isnan, alone.losses)):
        step = [*map(math.isnan, alone.losses)].index(True)
        raise ValueError(f"the loss of step {step} in one process is NaN in {precision}.")
    nudged = _differences_by_step(record(task, nudged=True), alone)
    worst = [max(pair) for pair in zip(*nudged, strict=True)]
    tolerance = tolerance_of(alone.weights[0])
    bounds = [max(tolerance, GROWTH * each) for each in accumulate(worst, max)]
    found.rounding[precision] = nudged[1]
    for mesh in meshes:
        compared = Comparison(mesh, precision, bounds=bounds)
        found.comparisons.append(compared)
        ranks = replace(task, mesh=mesh)
        try:
            run = record(ranks)
        except ProcessRaisedException as error:
            compared.failed = _last_line(error)
            continue
        if run.refused:
            compared.failed = run.refused
            continue
        compared.losses, compared.weights = _differences_by_step(run, alone)
        step = compared.first_beyond
        compared.failed = "" if step is not None else next(iter(run.apart_in_steps), "")
        if step is not None and found.culprit is None:
            found.culprit = find_culprit(task, ranks, step, bounds[step])
            found.culprit_on = f"{compared.ranks} in {precision}"


def _differences_by_step(run: Record, alone: Record) -> tuple[list[float], list[float]]:
    """Return the relative differences of losses, and of all weights together, in each step."""
    losses = [
        difference(one, other, 0.0) for one, other in zip(run.losses, alone.losses, strict=True)
    ]
    weights = [
        difference_of_all(one, other) for one, other in zip(run.weights, alone.weights, strict=True)
    ]
    return losses, weights


def _facts(batches: Sequence[Any], *, simulated: bool) -> dict[str, str]:
    """Return what a reader needs to make the certificate anew."""
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
