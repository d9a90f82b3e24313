"""Darcy flow as a LightningDataModule: solved here and cached, or read from local files.

Held-out samples are one file per resolution: its first `num_val` samples validate, the following
`num_test` test. With `num_val` 0 the test samples validate. Shapes: B samples per data-parallel
rank, H = W nodes a side, boundary included.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_modules.darcy.download import ensure_downloaded
from lightning_modules.darcy.files import (
    DarcyRecipe,
    Part,
    ensure_cached,
    field_group,
    find_samples,
    read_samples,
)
from lightning_modules.darcy.stats import DarcyStats, ensure_stats, read_stats, stats_of
from lightning_modules.shared.loading import make_loader
from lightning_modules.shared.numbers import at_least
from lightning_shard import FieldDataset


class _Pairs(Dataset[dict[str, Any]]):
    """Serves two stacked tensors as a dataset of dicts."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}


SUFFIXES = {"memory": ".pt", "hdf5": ".h5", "zarr": ".zarr"}


class DarcyDataModule(LightningDataModule):
    """Serves coefficient and pressure of Darcy flow, at one training and several test resolutions.

    Batches are `{"x": (B, 1, H, W), "y": (B, 1, H, W)}`, float32, without units. There is one
    validation and one test loader per test resolution. `stats` describes the training set after
    `setup`.

    Args:
        train_resolution: Nodes a side of the training samples.
        test_resolutions: Nodes a side of the validation and test samples; by default the training
            resolution and twice that. Prefer even sizes: neuraloperator 2.0.0 shifts every mode
            by one on odd ones.
        num_train: Number of training samples.
        num_val: Number of validation samples per test resolution. With 0 nothing is held out, and
            all test samples validate, too, as in neuraloperator's examples.
        num_test: Number of test samples per test resolution, or one number for each of them.
        batch_size: Training samples per data-parallel rank and step.
        eval_batch_size: Validation and test samples per data-parallel rank and step, or one number
            for each test resolution; by default `batch_size`.
        num_workers: Worker processes per loader.
        root: Folder where generated samples are kept.
        seed: Seed of the generated samples.
        source: The samples to read instead of generating them: a folder with neuraloperator's
            files `darcy_{train,test}_{resolution}.pt` (or `.h5` or `.zarr` with arrays x and y),
            or one HDF5 file or Zarr group with groups `{train,test}_{resolution}`. Of HDF5 and
            Zarr each rank reads its part of a sample when it needs it.
        storage: The form of generated samples: "memory" for files that are read whole, "hdf5" and
            "zarr" for fields that are too large for that.
        prefetch_factor: Batches that each worker reads ahead.
        pin_memory: True puts batches into page-locked memory where there is an accelerator.
        download: Fetch neuraloperator's files into the folder `source` where they are missing, of
            16, 32, 64, 128 or 421 nodes a side.

    Raises:
        ValueError: A number is too small, or has no meaning for `test_resolutions`.
    """

    def __init__(
        self,
        train_resolution: int = 32,
        test_resolutions: list[int] | None = None,
        num_train: int = 1000,
        num_val: int = 50,
        num_test: int | list[int] = 50,
        batch_size: int = 16,
        eval_batch_size: int | list[int] | None = None,
        num_workers: int = 0,
        root: str = "data/darcy",
        seed: int = 0,
        source: str | None = None,
        storage: Literal["memory", "hdf5", "zarr"] = "memory",
        prefetch_factor: int = 2,
        pin_memory: bool = True,
        download: bool = False,
    ) -> None:
        super().__init__()
        if storage not in SUFFIXES:
            raise ValueError(f"storage must be one of {', '.join(SUFFIXES)}; got {storage!r}.")
        at_least(3, train_resolution=train_resolution, test_resolutions=test_resolutions)
        if test_resolutions == []:
            raise ValueError("test_resolutions must have at least one resolution; got [].")
        if test_resolutions and len({*test_resolutions}) < len(test_resolutions):
            raise ValueError(f"each of test_resolutions must be there once; got {test_resolutions}")
        at_least(1, num_train=num_train, num_test=num_test, prefetch_factor=prefetch_factor)
        at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        at_least(0, num_val=num_val, num_workers=num_workers, seed=seed)
        if download and source is None:
            raise ValueError(
                "download needs a folder for neuraloperator's files: name it by `source`, such as "
                "data/neuraloperator, or leave download out to generate samples."
            )
        self.save_hyperparameters()
        self.train_resolution = train_resolution
        self.test_resolutions = test_resolutions or [train_resolution, 2 * train_resolution]
        self.num_train, self.num_val = num_train, num_val
        self.num_test = self._of_each("num_test", num_test)
        self.batch_size = batch_size
        eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.eval_batch_size = self._of_each("eval_batch_size", eval_batch_size)
        self.loading: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
        }
        self.root = Path(root)
        self.seed = seed
        self.source = None if source is None else Path(source)
        self.download = download
        self.storage = storage
        self.stats: DarcyStats | None = None
        if odd := sorted({n for n in (train_resolution, *self.test_resolutions) if n % 2}):
            rank_zero_warn(
                f"Even resolutions are needed for errors that compare across resolutions; got "
                f"{odd}. neuraloperator 2.0.0 shifts every mode by one there: use even sizes."
            )

    @override
    def prepare_data(self) -> None:
        if self.source is None:
            suffix = SUFFIXES[self.storage]
            ensure_cached(self._recipe("train", self.train_resolution), self.root, suffix)
            for resolution in self.test_resolutions:
                ensure_cached(self._recipe("test", resolution), self.root, suffix)
        elif self.download:
            ensure_downloaded(self.source, self.train_resolution, self.test_resolutions)
        path = self._path("train", self.train_resolution)
        if path.suffix != ".pt":
            group = field_group(path, "train", self.train_resolution, self.num_train)
            ensure_stats(path, group, self.num_train, self.root)

    @override
    def setup(self, stage: str) -> None:
        (self._train,) = self._read("train", self.train_resolution, [self.num_train])
        if isinstance(self._train, FieldDataset):
            path, group = self._train.file.path, self._train.file.group
            self.stats = read_stats(path, group, self.num_train, self.root)
        else:
            self.stats = stats_of(self._train.x, self._train.y)
        pairs = [
            self._read("test", resolution, [self.num_val, self.num_val + num_test])
            for resolution, num_test in self.num_test.items()
        ]
        self._val, self._test = (list(part) for part in zip(*pairs, strict=True))
        if self.num_val == 0:
            self._val = self._test

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        return self._loader(self._train, self.batch_size, shuffle=True)

    @override
    def val_dataloader(self) -> list[DataLoader[dict[str, Any]]]:
        sizes = self.eval_batch_size.values()
        return [self._loader(*each) for each in zip(self._val, sizes, strict=True)]

    @override
    def test_dataloader(self) -> list[DataLoader[dict[str, Any]]]:
        sizes = self.eval_batch_size.values()
        return [self._loader(*each) for each in zip(self._test, sizes, strict=True)]

    @override
    def predict_dataloader(self) -> list[DataLoader[dict[str, Any]]]:
        return self.test_dataloader()

    def _of_each(self, name: str, value: int | list[int]) -> dict[int, int]:
        """Return an option for each test resolution."""
        resolutions = self.test_resolutions
        values = value if isinstance(value, list) else [value] * len(resolutions)
        if len(values) != len(resolutions):
            raise ValueError(
                f"{name} must be one number, or one for each of the test resolutions "
                f"{resolutions}; got {value}."
            )
        return dict(zip(resolutions, values, strict=True))

    def _loader(
        self, dataset: Dataset[dict[str, Any]], batch_size: int, *, shuffle: bool = False
    ) -> DataLoader[dict[str, Any]]:
        return make_loader(dataset, batch_size, shuffle=shuffle, **self.loading)

    def _recipe(self, part: Part, resolution: int) -> DarcyRecipe:
        count = self.num_train
        if part == "test":
            count = self.num_val + self.num_test[resolution]
        return DarcyRecipe(part, resolution, count, seed=self.seed)

    def _path(self, part: Part, resolution: int) -> Path:
        if self.source is None:
            return self._recipe(part, resolution).path(self.root, SUFFIXES[self.storage])
        return find_samples(self.source, part, resolution)

    def _read(
        self, part: Part, resolution: int, ends: list[int]
    ) -> list[_Pairs] | list[FieldDataset]:
        """Read the first samples, cut at `ends`."""
        path, ranges = self._path(part, resolution), list(pairwise([0, *ends]))
        if path.suffix == ".pt":
            x, y = read_samples(path, part, resolution, ends[-1])
            return [_Pairs(x[low:high], y[low:high]) for low, high in ranges]
        group = field_group(path, part, resolution, ends[-1])
        return [
            FieldDataset(path, ("x", "y"), self.trainer, range(*ends), group) for ends in ranges
        ]
