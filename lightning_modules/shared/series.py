"""Pairs of states and the states that follow, from files of simulations and of weather.

Shapes: B samples, C channels of a state, constant ones included in `x`; *spatial is one to three
dims.
"""

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_modules.shared.field_files import HDF5, ZARR
from lightning_modules.shared.numbers import at_least
from lightning_modules.shared.series_files import NETCDF, SeriesFile, describe, open_series
from lightning_shard import slab_of


class SeriesDataset(Dataset[dict[str, Any]]):
    """Samples `{"x": states, "y": the states after them}`: of each field this rank's part alone.

    Reads HDF5 files of the Well and of PDEBench, NetCDF, and Zarr groups that xarray reads, such as
    ERA5's. `x` is (inputs * C + constants, *spatial): the channels of the first step, then those of
    the next, then the variables that do not vary with time. `y` is (outputs * C, *spatial). Steps
    of one sample lie in one trajectory of one file. Values are those of the file: nothing is
    normalized, and NaN (land in a field of the sea) stays NaN.

    Args:
        path: A file, a folder of files, or several of these.
        variables: Their names; by default all that vary with time. The levels of a variable, and
            the components of a vector, are channels.
        trainer: The trainer that will use the samples; None for whole fields.
        inputs: Steps in `x`; 0 for the constant variables alone.
        outputs: Steps in `y`.
        every: Steps of the file from one step of a sample to the next.
        select: Coordinates to keep, for NetCDF and Zarr: `{"level": [500, 850]}`.
        time: The dim of steps, for NetCDF and Zarr.
        spatial_dims: Number of spatial dims, where the file does not say it.
        dtype: What fields are converted to.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file cannot be read, lacks a variable, is on another grid than the first, or
            no trajectory is long enough.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        variables: Sequence[str] | None = None,
        trainer: Trainer | None = None,
        inputs: int = 1,
        outputs: int = 1,
        every: int = 1,
        select: Mapping[str, Sequence[Any]] | None = None,
        time: str = "time",
        spatial_dims: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        at_least(0, inputs=inputs)
        at_least(1, outputs=outputs, every=every, spatial_dims=spatial_dims)
        self.select, self.dtype = select, dtype
        paths = [path] if isinstance(path, (str, Path)) else path
        names = [file for each in paths for file in _files(Path(each))]
        self.files = [describe(file, variables, select, time, spatial_dims) for file in names]
        _same_states(self.files)
        first = self.files[0]
        varying = sum(v.components for v in first.variables if "T" in v.dims)
        constant = sum(v.components for v in first.variables if "T" not in v.dims)
        channels = {"x": inputs * varying + constant, "y": outputs * varying}
        if not all(channels.values()):
            empty = min(channels, key=lambda key: channels[key])
            raise ValueError(
                f"{empty!r} would have no channels: the variables "
                f"{', '.join(v.name for v in first.variables)} with inputs={inputs}; name "
                "variables that vary with time, or take more inputs."
            )
        self.inputs = range(0, inputs * every, every)
        self.targets = range(inputs * every, (inputs + outputs) * every, every)
        self._length = (inputs + outputs - 1) * every  # from the first to the last step
        counts = [file.trajectories * max(file.steps - self._length, 0) for file in self.files]
        self._ends = list(accumulate(counts))
        if not self._ends[-1]:
            raise ValueError(
                f"a sample spans {self._length + 1} steps, but the longest trajectory has "
                f"{max(file.steps for file in self.files)}; ask for fewer inputs or outputs."
            )
        self.slabs = {
            key: slab_of(trainer, key, (count, *first.extents), dtype)
            for key, count in channels.items()
        }
        self._opened: tuple[int, dict[Path, Any]] = 0, {}

    def __len__(self) -> int:
        return self._ends[-1]

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} samples; got {index}.")
        number = bisect_right(self._ends, index)
        file = self.files[number]
        within = index - (self._ends[number - 1] if number else 0)
        trajectory, start = divmod(within, file.steps - self._length)
        entries: dict[str, Any] = {}
        for key, slab in self.slabs.items():
            steps = self.inputs if key == "x" else self.targets
            part = slab.index[1:]
            fields = [self._read(file, trajectory, start + step, part, "T") for step in steps]
            fields += [self._read(file, trajectory, 0, part, "")] if key == "x" else []
            values = np.concatenate([f for group in fields for f in group])[slab.index[0]]
            values = values.astype(values.dtype.newbyteorder("="))  # NetCDF 3 is big-endian
            entries[key] = slab.part(torch.from_numpy(values).to(self.dtype), index)
        return entries

    def _read(
        self, file: SeriesFile, trajectory: int, step: int, part: Sequence[slice], dims: str
    ) -> list[np.ndarray]:
        """The variables that vary with time ("T"), or those that do not."""
        opened = self._open(file.path)
        return [
            file.read(opened, variable, trajectory, step, part)
            for variable in file.variables
            if ("T" in variable.dims) == bool(dims)
        ]

    def _open(self, path: Path) -> Any:
        """An open file; each process has its own, since none may use that of another."""
        if self._opened[0] != os.getpid():
            self._opened = os.getpid(), {}
        files = self._opened[1]
        if path not in files:
            files[path] = open_series(path, self.select)
        return files[path]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": (0, {})}


class SeriesDataModule(LightningDataModule):
    """Loaders of `SeriesDataset`, one for each stage; without normalization.

    Args:
        train: Files or folders of the training samples.
        val: Of the validation samples, if there are any.
        test: Of the test samples, if there are any; `predict` reads them, too.
        variables: See `SeriesDataset`, like the arguments up to `spatial_dims`.
        inputs: Steps in `x`.
        outputs: Steps in `y`.
        every: Steps of the file from one step of a sample to the next.
        select: Coordinates to keep, for NetCDF and Zarr.
        time: The dim of steps, for NetCDF and Zarr.
        spatial_dims: Number of spatial dims, where the file does not say it.
        batch_size: Samples per data-parallel rank and step.
        num_workers: Worker processes per loader.

    Raises:
        ValueError: A number is too small.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        variables: list[str] | None = None,
        inputs: int = 1,
        outputs: int = 1,
        every: int = 1,
        select: dict[str, list[float]] | None = None,
        time: str = "time",
        spatial_dims: int = 2,
        batch_size: int = 1,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        at_least(1, batch_size=batch_size)
        at_least(0, num_workers=num_workers)
        self.save_hyperparameters()
        self.paths = {"train": train, "val": val, "test": test}
        self.batch_size, self.num_workers = batch_size, num_workers
        self.options: dict[str, Any] = {
            "variables": variables, "inputs": inputs, "outputs": outputs, "every": every,
            "select": select, "time": time, "spatial_dims": spatial_dims,
        }  # fmt: skip

    @override
    def setup(self, stage: str) -> None:
        self.datasets = {
            name: SeriesDataset(path, trainer=self.trainer, **self.options)
            for name, path in self.paths.items()
            if path is not None
        }

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        return self._loader("train", shuffle=True)

    @override
    def val_dataloader(self) -> Any:
        return self._loader("val") if "val" in self.datasets else []

    @override
    def test_dataloader(self) -> Any:
        return self._loader("test") if "test" in self.datasets else []

    @override
    def predict_dataloader(self) -> Any:
        return self.test_dataloader()

    def _loader(self, name: str, *, shuffle: bool = False) -> DataLoader[dict[str, Any]]:
        return DataLoader(
            self.datasets[name],
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def _files(path: Path) -> list[Path]:
    """The files of a folder in the order of their names, or the file.

    Raises:
        FileNotFoundError: The folder has none.
    """
    if not path.is_dir() or path.suffix in ZARR:
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in HDF5 + ZARR + NETCDF)
    if not found:
        raise FileNotFoundError(
            f"the folder {path} has no file that ends in {', '.join(HDF5 + ZARR + NETCDF)}; name "
            "another folder, or a file."
        )
    return found


def _same_states(files: Sequence[SeriesFile]) -> None:
    """Compare all files with the first.

    Raises:
        ValueError: One has another grid or other channels.
    """
    states = [
        ([(v.name, v.components, "T" in v.dims) for v in file.variables], file.extents)
        for file in files
    ]
    for file, state in zip(files, states, strict=True):
        if state != states[0]:
            raise ValueError(
                f"{file.path} holds {_words(state)}, but {files[0].path} holds "
                f"{_words(states[0])}; name variables that are alike in all files."
            )


def _words(state: tuple[list[tuple[str, int, bool]], tuple[int, ...]]) -> str:
    variables, extents = state
    names = ", ".join(f"{name} ({count} channels)" for name, count, _ in variables)
    return f"{names} on a grid of {' x '.join(map(str, extents))}"
