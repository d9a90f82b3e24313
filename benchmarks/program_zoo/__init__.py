"""Training programs of other people, small, on random data: what benchmarks/programs.py runs.

A program is a function that makes a LightningModule of an installed package, samples, and arguments
of the Trainer. The decorator `program` says of which package it is, and what was changed in it.
"""

import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import DataLoader

FILES = (
    "anomalies earth images language microscopy sciences self_supervised tables uncertainty "
    "volumes weather"
).split()


@dataclass
class Parts:
    """What a Trainer is given.

    Attributes:
        module: The LightningModule.
        data: Samples, or a function that makes a data loader or a data module for a batch size.
        batch: The number of samples in a batch of all replicas.
        trainer: Arguments of the Trainer.
        strategy: Arguments of `HybridShardStrategy`.
        stages: The stages that run, in this order.
        callbacks: Callbacks of the program.
        validates: Whether the fit validates, on the same batches.
        engine: Makes what trains from the arguments of a Trainer, where that is no Trainer.
    """

    module: Any
    data: Sequence[Any] | Callable[[int], Any]
    batch: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    stages: tuple[str, ...] = ("fit",)
    callbacks: Sequence[Any] = ()
    validates: bool = True
    engine: Callable[..., Any] | None = None

    def loader(self, size: int) -> Any:
        """Make batches of `size` samples."""
        if callable(self.data):
            return self.data(size)
        return DataLoader(self.data, size)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        package: The package on PyPI whose program it is.
        name: The name in the table.
        make: Makes it, in each process with the same random numbers.
        imports: The packages that it imports, by the names that Python knows.
        changed: Words for what was changed in the program; "" for nothing.
        meshes: The meshes of data replicas and domain ranks that it runs on.
        float32: True if some part of it computes in float32.
        refused: Words of the sentence in which it ends, or "".
        host: The package whose Trainer it is given.
        large: Arguments of `make` for inputs that are large enough to weigh.
    """

    package: str
    name: str
    make: Callable[..., Parts]
    imports: tuple[str, ...]
    changed: str = ""
    meshes: tuple[str, ...] = ("1x2",)
    float32: bool = False
    refused: str = ""
    host: str = "lightning.pytorch"
    large: dict[str, Any] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """Name the packages that are not installed."""
        needed = (*self.imports, self.host.partition(".")[0])
        return ", ".join(name for name in needed if importlib.util.find_spec(name) is None)

    @property
    def version(self) -> str:
        """Give the version of the package, "" if it is not there."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""


PROGRAMS: dict[str, Program] = {}
SPLIT = ("1x2", "2x1", "2x2")


def program(package: str, *imports: str, **attributes: Any) -> Callable[..., Callable[..., Parts]]:
    """Add the function below to `PROGRAMS`.

    Args:
        package: Its package on PyPI.
        imports: The packages that it imports; by default that package.
        attributes: Others of `Program`; `name` is by default the name of the function.
    """

    def add(make: Callable[..., Parts]) -> Callable[..., Parts]:
        name = attributes.pop("name", None) or make.__name__
        assert name not in PROGRAMS, name
        needed = imports or (package.replace("-", "_"),)
        PROGRAMS[name] = Program(package, name, make, needed, **attributes)
        return make

    return add


def rows(
    package: str, *imports: str, table: dict[str, Callable[..., Parts]], **attributes: Any
) -> None:
    """Add the programs of a table, which share package and attributes, by their names."""
    for name, make in table.items():
        program(package, *imports, name=name, **attributes)(make)


def programs() -> dict[str, Program]:
    """Collect the programs of all files."""
    for file in FILES:
        importlib.import_module(f"benchmarks.program_zoo.{file}")
    return PROGRAMS


@contextmanager
def without_weights() -> Iterator[None]:
    """Let timm make networks with random weights, where a package asks for trained ones."""
    import timm

    make = timm.create_model
    with patch.object(timm, "create_model", lambda *a, **k: make(*a, **{**k, "pretrained": False})):
        yield


def folder(name: str) -> str:
    """Name a folder for what a program writes, the same on all ranks."""
    return str(Path(tempfile.gettempdir()) / "lightning_shard_programs" / name)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers in the default dtype, which a program's runner sets."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(torch.get_default_dtype())


def classes(*shape: int, of: int = 2, seed: int = 0) -> Tensor:
    """Random integers below `of`."""
    return torch.randint(of, shape, generator=torch.Generator().manual_seed(seed))


def fields(count: int, make: Callable[[int], Any]) -> list[Any]:
    """Make `count` samples, each from its number."""
    return [make(i) for i in range(count)]


def pictures(*names: str) -> list[Any]:
    """Make four images and the classes of their pixels, as pairs or under two names."""
    pairs = [(numbers(3, 64, 64, seed=i), classes(64, 64, of=3, seed=i)) for i in range(4)]
    return [dict(zip(names, pair, strict=True)) for pair in pairs] if names else pairs


def supervised(net: Any, loss: Callable[[Any, Any], Tensor], lr: float = 1e-3) -> Any:
    """Make the LightningModule that most examples write by hand: pairs, a loss, Adam."""
    from lightning.pytorch import LightningModule

    class Supervised(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def step(self, batch: Any, name: str) -> Tensor:
            value = loss(self.net(batch[0]), batch[1])
            self.log(name, value, sync_dist=True)
            return value

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.step(batch, "train_loss")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.step(batch, "val_loss")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr)

    return Supervised()
