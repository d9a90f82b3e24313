"""Which metrics of torchmetrics run on split maps, beside one process: the table docs/metrics.md.

python -m benchmarks.metrics > docs/metrics.md
"""

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lightning_shard
from lightning_shard import UnsupportedOperationError

PACKAGES = ("classification", "regression", "segmentation", "image", "audio")
NETWORKS = (
    "DeepImageStructureAndTextureSimilarity", "LearnedPerceptualImagePatchSimilarity",
    "MemorizationInformedFrechetInceptionDistance", "PerceptualPathLength",
    "FrechetInceptionDistance", "InceptionScore", "KernelInceptionDistance",
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "FBetaScore": {"beta": 2.0}, "PrecisionAtFixedRecall": {"min_recall": 0.5},
    "RecallAtFixedPrecision": {"min_precision": 0.5},
    "SensitivityAtSpecificity": {"min_specificity": 0.5},
    "SpecificityAtSensitivity": {"min_sensitivity": 0.5},
    "Fairness": {"num_groups": 2}, "GroupStatRates": {"num_groups": 2},
    "CriticalSuccessIndex": {"threshold": 0.5}, "MinkowskiDistance": {"p": 3.0},
    "StructuralSimilarityIndexMeasure": {"data_range": 1.0},
    "PeakSignalNoiseRatio": {"data_range": 1.0},
    "PeakSignalNoiseRatioWithBlockedEffect": {"data_range": 1.0},
}  # fmt: skip
EXACT = "exact"

Made = tuple[tuple[Any, ...], tuple[int, ...]]  # the operands, and the dim that splits each


@dataclass(frozen=True)
class Case:
    """A metric, its options, and what makes the operands of its update."""

    package: str
    name: str
    make: Callable[[], Made]
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return self.name

    def metric(self, **options: Any) -> Any:
        kind = getattr(importlib.import_module(f"torchmetrics.{self.package}"), self.name)
        if self.name != "PermutationInvariantTraining":  # it has no such option
            options["sync_on_compute"] = False  # every rank has the whole answer
        return kind(**self.options, **options)


def cases() -> Iterator[Case]:
    """Every metric of the packages that computes something itself, without a trained network."""
    for package in PACKAGES:
        module = importlib.import_module(f"torchmetrics.{package}")
        for name in module.__all__:
            parameters = inspect.signature(getattr(module, name).__new__).parameters
            if name not in NETWORKS and "task" not in parameters:
                yield _case(package, name)


def _case(package: str, name: str) -> Case:
    options = next((o for end, o in OPTIONS.items() if name.endswith(end)), {})
    if package == "classification":
        make, more = _classes(name)
    elif package == "segmentation":
        make, more = _one_hot, {"num_classes": 3}
    else:
        of_package = {"regression": _numbers, "image": _images}
        make, more = {**of_package, **MAKERS}.get(name, of_package.get(package, _sound)), {}
    if name == "PermutationInvariantTraining":
        from torchmetrics.functional.audio import signal_noise_ratio

        more = {"metric_func": signal_noise_ratio}
    return Case(package, name, make, {**options, **more})


def _classes(name: str) -> tuple[Callable[[], Made], dict[str, Any]]:
    if name.startswith("Binary"):
        return (_groups if "Group" in name or "Fairness" in name else _binary), {}
    if name.startswith("Multiclass"):
        return _multiclass, {"num_classes": 3}
    return _multilabel, {"num_labels": 3}


def _binary() -> Made:
    return (torch.rand(4, 6, 5), torch.randint(2, (4, 6, 5))), (1, 1)


def _groups() -> Made:
    return (torch.rand(24), torch.randint(2, (24,)), torch.randint(2, (24,))), (0, 0, 0)


def _multiclass() -> Made:
    return (torch.rand(4, 3, 6, 5).softmax(1), torch.randint(3, (4, 6, 5))), (2, 1)


def _multilabel() -> Made:
    return (torch.rand(4, 3, 6, 5), torch.randint(2, (4, 3, 6, 5))), (2, 2)


def _numbers() -> Made:
    return (torch.rand(25) + 0.1, torch.rand(25) + 0.1), (0, 0)


def _rows() -> Made:
    return (torch.rand(13, 4).softmax(1), torch.rand(13, 4).softmax(1)), (0, 0)


def _members() -> Made:
    return (torch.rand(13, 4), torch.rand(13)), (0, 0)


def _one_hot() -> Made:
    maps = (torch.randint(3, (2, 13, 13)) for _ in range(2))
    return tuple(torch.nn.functional.one_hot(m, 3).movedim(-1, 1) for m in maps), (2, 2)


def _images(size: int = 49, channels: int = 3) -> Made:
    return tuple(torch.rand(2, channels, size, size) for _ in range(2)), (2, 2)


def _image() -> Made:
    return (torch.rand(2, 3, 17, 16),), (2,)


def _panchromatic() -> Made:
    target = {"ms": torch.rand(2, 3, 16, 16), "pan": torch.rand(2, 3, 32, 32)}
    return (torch.rand(2, 3, 32, 32), target), (2, 2)


def _sound(channels: int = 2) -> Made:
    return tuple(torch.randn(3, channels, 901) for _ in range(2)), (2, 2)


def _spectra() -> Made:
    return tuple(torch.randn(2, 33, 20, 2) for _ in range(2)), (1, 1)


MAKERS: dict[str, Callable[[], Made]] = {
    "CosineSimilarity": _rows, "KLDivergence": _rows, "JensenShannonDivergence": _rows,
    "ContinuousRankedProbabilityScore": _members,
    "MultiScaleStructuralSimilarityIndexMeasure": partial(_images, 177),
    "PeakSignalNoiseRatioWithBlockedEffect": partial(_images, 49, 1),
    "TotalVariation": _image, "QualityWithNoReference": _panchromatic,
    "SpatialDistortionIndex": _panchromatic,
    "ComplexScaleInvariantSignalNoiseRatio": _spectra,
}  # fmt: skip


def outcome(case: Case, mesh: DeviceMesh) -> str:
    """`exact`, why it is refused, or what is wrong."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    made, dims = case.make()
    whole = case.metric()
    whole.update(*made)
    expected = whole.compute()
    found = _of_split(case, made, dims, expected, mesh)
    if found != EXACT and case.package == "classification":
        unchecked = _of_split(case, made, dims, expected, mesh, validate_args=False)
        if unchecked == EXACT:
            return f"exact with `validate_args=False`; {found} otherwise"
    return found


def _of_split(
    case: Case,
    made: tuple[Any, ...],
    dims: tuple[int, ...],
    expected: Any,
    mesh: DeviceMesh,
    **options: Any,
) -> str:
    metric = case.metric(**options)
    try:
        metric.update(*(_split(x, mesh, dim) for x, dim in zip(made, dims, strict=True)))
        found = metric.compute()
    except UnsupportedOperationError as error:
        return f"refused: {str(error).removeprefix('cannot run ').split(' on a tensor split')[0]}"
    except Exception as error:
        return f"FAILS: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return EXACT if _alike(found, expected) else f"WRONG: {found}, expected {expected}"[:200]


def _split(x: Any, mesh: DeviceMesh, dim: int) -> Any:
    if isinstance(x, dict):
        return {name: lightning_shard.shard(each, mesh, dim) for name, each in x.items()}
    return lightning_shard.shard(x, mesh, dim)


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return all(_alike(found[name], each) for name, each in expected.items())
    if isinstance(expected, list | tuple):
        return all(_alike(f, e) for f, e in zip(found, expected, strict=True))
    if not isinstance(expected, Tensor):
        return found == expected
    found = lightning_shard.gather(found)
    return found.shape == expected.shape and torch.allclose(
        found.double(), expected.double(), rtol=1e-5, atol=1e-6, equal_nan=True
    )


def outcomes() -> dict[str, dict[str, str]]:
    """By package and metric; runs on all ranks."""
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    found: dict[str, dict[str, str]] = {package: {} for package in PACKAGES}
    for case in cases():
        found[case.package][case.name] = outcome(case, mesh)
    return found


HEAD = """# Metrics of torchmetrics on split maps

Made by `python -m benchmarks.metrics`: each metric is given maps that are split over two ranks, and
compared with the same metric in one process (float32, 1e-5). *refused* names the function that has
no rule: give such a metric `lightning_shard.gather(map)`. Metrics that need a trained network (FID,
LPIPS and their like) are not in the table.
"""


def main() -> None:
    found = lightning_shard.launch(outcomes, processes=2)
    found = found[0] if isinstance(found, list) else found
    print(f"{HEAD}\ntorchmetrics {version('torchmetrics')}, torch {torch.__version__}.")
    for package, rows in found.items():
        exact = sum(value == EXACT for value in rows.values())
        print(f"\n## {package}: {exact} of {len(rows)} exact\n")
        print("| metric | on split maps |\n| --- | --- |")
        for name, value in rows.items():
            print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
