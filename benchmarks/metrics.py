"""Which metrics of torchmetrics run on split maps, beside one process: the table docs/metrics.md.

python -m benchmarks.metrics > docs/metrics.md
"""

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard
from benchmarks.common import QUIET, table
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
SINGLE = ("HausdorffDistance", "SpatialCorrelationCoefficient")  # they make float32 of float64
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

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Make numbers in float64 while open, or in float32 for a metric that knows no other."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if self.name in SINGLE else torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    @property
    def key(self) -> str:
        """A name that no metric of another package has."""
        return f"{self.package}_{self.name}"

    def metric(self, **options: Any) -> Any:
        kind = getattr(importlib.import_module(f"torchmetrics.{self.package}"), self.name)
        if self.name == "PermutationInvariantTraining":  # it has no such option
            options.pop("sync_on_compute", None)
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


class Validation(LightningModule):
    """Gives each metric maps in two steps on each replica, and computes it as the epoch ends."""

    def __init__(self, cases: Sequence[Case], **options: Any) -> None:
        """Make the metrics.

        Args:
            cases: What is measured.
            options: Further options of the metrics.
        """
        super().__init__()
        self.cases = {case.key: case for case in cases}
        self.metrics = torch.nn.ModuleDict()
        for name, case in self.cases.items():
            with case.precision():
                self.metrics[name] = case.metric(**options)
        self.steps: dict[str, dict[int, Any]] = {name: {} for name in self.cases}
        self.epoch: dict[str, Any] = {}
        self.refused: dict[str, str] = {}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Give each metric the maps of this step, and keep what it returns for them."""
        seed = int(batch[0])
        for name, case in self.cases.items():
            with case.precision(), self.noting(name):
                torch.manual_seed(seed)
                made, dims = case.make()
                if isinstance(self.trainer.strategy, lightning_shard.HybridShardStrategy):
                    mesh = self.trainer.strategy.domain_mesh
                    made = tuple(_split(x, mesh, dim) for x, dim in zip(made, dims, strict=True))
                metric: Any = self.metrics[name]
                self.steps[name][seed] = metric(*made)

    def on_validation_epoch_end(self) -> None:
        """Compute each metric over all steps of all replicas; a number is logged, too."""
        metrics: Mapping[str, Any] = dict(self.metrics)
        for name, metric in metrics.items():
            if name not in self.refused:
                with self.cases[name].precision(), self.noting(name):
                    self.epoch[name] = metric.compute()
                if isinstance(value := self.epoch.get(name), Tensor) and value.numel() == 1:
                    self.log(name, metric)

    @contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Keep the reason why a metric cannot be had, and go on with the others."""
        try:
            yield
        except UnsupportedOperationError as error:
            function = str(error).removeprefix("cannot run ").split(" on a tensor split")[0]
            self.refused[name] = f"refused: {function}"
        except Exception as error:
            first = str(error).splitlines()[0][:100]
            self.refused[name] = f"FAILS: {type(error).__name__}: {first}"


class Stably(TorchFunctionMode):
    """Sorts equal values in their order.

    The function itself stays torch's: the first split tensor loads the rules, which are kept by it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `torch.argsort` with `stable=True`, and others as they are called."""
        stable = {"stable": True} if func is torch.argsort else {}
        return func(*args, **(kwargs or {}), **stable)


def outcomes(cases: Sequence[Case], domain: int = 2) -> dict[str, str]:
    """Say of each metric `exact`, why it is refused, or what is wrong; all ranks call it.

    One process sorts stably here: torch promises no order of equal values, and LogAUC needs one.
    """
    warnings.simplefilter("ignore")
    world = dist.get_world_size()
    replicas = world // domain

    def validated(trainer: Trainer, **options: Any) -> tuple[Validation, Mapping[str, Any]]:
        module = Validation(cases, **options)
        trainer.validate(
            module, DataLoader(TensorDataset(torch.arange(2 * replicas))), verbose=False
        )
        return module, trainer.callback_metrics

    one = Trainer(devices=1, plugins=[LightningEnvironment()], accelerator="cpu", **QUIET)
    with Stably():
        alone, _ = validated(one, sync_on_compute=False)
    strategy = lightning_shard.HybridShardStrategy(domain_parallel_size=domain)
    elastic = TorchElasticEnvironment()
    split = Trainer(devices=world, strategy=strategy, plugins=elastic, accelerator="cpu", **QUIET)
    found, logged = validated(split)
    return {name: _compared(name, alone, found, logged) for name in found.cases}


def _compared(name: str, alone: Validation, found: Validation, logged: Mapping[str, Any]) -> str:
    if reason := alone.refused.get(name, found.refused.get(name)):
        return reason
    for step, value in found.steps[name].items():
        if not _alike(value, alone.steps[name][step]):
            return f"WRONG in a step: {value}, expected {alone.steps[name][step]}"[:200]
    expected = alone.epoch[name]
    for value in (found.epoch[name], logged.get(name, expected)):
        if not _alike(value, expected):
            return f"WRONG: {value}, expected {expected}"[:200]
    return EXACT


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
    found, single = lightning_shard.gather(found), expected.dtype == torch.float32
    rtol, atol = (1e-5, 1e-6) if single else (1e-12, 1e-13)
    return found.shape == expected.shape and torch.allclose(
        found.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True
    )


HEAD = """# Metrics of torchmetrics on split maps

Made by `python -m benchmarks.metrics`: in a validation of the Trainer each metric is given maps
that are split over two ranks. What it returns in each step, what it computes over the epoch and
what `self.log` makes of it are compared with one process (float64, 1e-12). A metric over several
data replicas, one that is copied, pickled or kept in hyper-parameters, and one in a
MetricCollection count alike. *refused* names the function that has no rule: give such a metric
`lightning_shard.gather(map)`. Metrics that need a trained network (FID, LPIPS and their like) are
not in the table.
"""


def main() -> None:
    rows = [*cases()]
    found = lightning_shard.launch(outcomes, rows, processes=2)
    found = found[0] if isinstance(found, list) else found
    print(f"{HEAD}\ntorchmetrics {version('torchmetrics')}, torch {torch.__version__}.")
    for package in PACKAGES:
        of_package = {c.name: found[c.key] for c in rows if c.package == package}
        exact = sum(value == EXACT for value in of_package.values())
        print(f"\n## {package}: {exact} of {len(of_package)} exact\n")
        table(("metric", "on split maps"), [*of_package.items()])


if __name__ == "__main__":
    main()
