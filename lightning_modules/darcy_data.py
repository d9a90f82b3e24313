"""Darcy flow as a LightningDataModule: solved here and cached, or read from local files.

Held-out samples are one file per resolution: its first `num_val` samples validate, the following
`num_test` test. Shapes: B samples per data-parallel rank, H = W nodes a side, boundary included.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_modules.darcy_files import (
    DarcyRecipe,
    Part,
    ensure_cached,
    find_samples,
    read_samples,
)


@dataclass(frozen=True)
class DarcyStats:
    """What a model may know of the training set before training.

    Attributes:
        x_mean: Mean of the coefficient over samples and nodes.
        x_std: Standard deviation of the coefficient.
        y_mean: Mean of the pressure.
        y_std: Standard deviation of the pressure.
        mean_solution: Mean pressure at each node of the training resolution, (1, H, W).
    """

    x_mean: float
    x_std: float
    y_mean: float
    y_std: float
    mean_solution: Tensor


class DarcyDataModule(LightningDataModule):
    """Coefficient and pressure of Darcy flow, at one training and several test resolutions.

    Batches are `{"x": (B, 1, H, W), "y": (B, 1, H, W)}`, float32, without units. There is one
    validation and one test loader per test resolution. `stats` describes the training set after
    `setup`.

    Args:
        train_resolution: Nodes a side of the training samples.
        test_resolutions: Nodes a side of the validation and test samples; by default the training
            resolution and twice that. Prefer even sizes: neuraloperator 2.0.0 shifts every mode
            by one on odd ones.
        num_train: Number of training samples.
        num_val: Number of validation samples per test resolution.
        num_test: Number of test samples per test resolution.
        batch_size: Samples per data-parallel rank and step.
        num_workers: Worker processes per loader.
        root: Folder where generated samples are kept.
        seed: Seed of the generated samples.
        source: Where to read samples instead of generating them: a folder with neuraloperator's
            files `darcy_{train,test}_{resolution}.pt` (or `.h5` with datasets x and y), or one
            HDF5 file with groups `{train,test}_{resolution}`.
    """

    def __init__(
        self,
        train_resolution: int = 32,
        test_resolutions: list[int] | None = None,
        num_train: int = 1000,
        num_val: int = 50,
        num_test: int = 50,
        batch_size: int = 16,
        num_workers: int = 0,
        root: str = "data/darcy",
        seed: int = 0,
        source: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.train_resolution = train_resolution
        self.test_resolutions = test_resolutions or [train_resolution, 2 * train_resolution]
        self.num_train, self.num_val, self.num_test = num_train, num_val, num_test
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.root = Path(root)
        self.seed = seed
        self.source = None if source is None else Path(source)
        self.stats: DarcyStats | None = None
        if odd := sorted({n for n in (train_resolution, *self.test_resolutions) if n % 2}):
            rank_zero_warn(
                f"Even resolutions are needed for errors that compare across resolutions; got "
                f"{odd}. neuraloperator 2.0.0 shifts every mode by one there: use even sizes."
            )

    @override
    def prepare_data(self) -> None:
        if self.source is None:
            ensure_cached(self._recipe("train", self.train_resolution), self.root)
            for resolution in self.test_resolutions:
                ensure_cached(self._recipe("test", resolution), self.root)

    @override
    def setup(self, stage: str) -> None:
        x, y = self._read("train", self.train_resolution)
        self._train = _Pairs(x, y)
        self.stats = DarcyStats(
            x_mean=x.mean().item(),
            x_std=x.std().item(),
            y_mean=y.mean().item(),
            y_std=y.std().item(),
            mean_solution=y.mean(dim=0),
        )
        held_out = [self._read("test", resolution) for resolution in self.test_resolutions]
        self._val = [_Pairs(x[: self.num_val], y[: self.num_val]) for x, y in held_out]
        self._test = [_Pairs(x[self.num_val :], y[self.num_val :]) for x, y in held_out]

    @override
    def train_dataloader(self) -> DataLoader:
        return self._loader(self._train, shuffle=True)

    @override
    def val_dataloader(self) -> list[DataLoader]:
        return [self._loader(dataset) for dataset in self._val]

    @override
    def test_dataloader(self) -> list[DataLoader]:
        return [self._loader(dataset) for dataset in self._test]

    @override
    def predict_dataloader(self) -> list[DataLoader]:
        return self.test_dataloader()

    def _loader(self, dataset: Dataset, *, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def _count(self, part: Part) -> int:
        return self.num_train if part == "train" else self.num_val + self.num_test

    def _recipe(self, part: Part, resolution: int) -> DarcyRecipe:
        return DarcyRecipe(part, resolution, self._count(part), seed=self.seed)

    def _read(self, part: Part, resolution: int) -> tuple[Tensor, Tensor]:
        if self.source is None:
            path = self._recipe(part, resolution).path(self.root)
        else:
            path = find_samples(self.source, part, resolution)
        return read_samples(path, part, resolution, self._count(part))


class _Pairs(Dataset[dict[str, Any]]):
    """Two stacked tensors as a dataset of dicts."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}
