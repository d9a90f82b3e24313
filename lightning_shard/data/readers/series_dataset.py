"""Gives pairs of states and the states that follow, from files of simulations and of weather.

Shapes: B samples, C channels of a state, constant ones included in `x`; `*spatial` is one to three
dims.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_shard.data.readers.field_file import HDF5, ZARR
from lightning_shard.data.readers.opened import mark_of
from lightning_shard.data.readers.series_file import NETCDF, SeriesFile
from lightning_shard.data.slab import slab_of


class SeriesDataset(Dataset[dict[str, Any]]):
    """Samples `{"x": states, "y": the states after them}`: of each field this rank's part alone.

    Reads HDF5 files of the Well and of PDEBench, NetCDF, and Zarr groups that xarray reads, such as
    ERA5's. `x` is `(inputs * C + constants, *spatial)`: the channels of the first step, then those
    of the next, then the variables that do not vary with time. `y` is `(outputs * C, *spatial)`.
    Steps of one sample lie in one trajectory of one file, whose times must increase; steps that are
    longer than others are told of by a warning. Values are those of the file: nothing is
    normalized, and NaN (land in a field of the sea) stays NaN.

    Args:
        path: A file, a folder of files, or several of these.
        variables: The names of variables; by default all that vary with time. The levels of a
            variable, and the components of a vector, are channels.
        trainer: The Trainer that will use the samples, or the domain mesh of a loop of your own;
            None for whole fields.
        inputs: Steps in `x`; 0 for the constant variables alone.
        outputs: Steps in `y`.
        every: Steps of the file from one step of a sample to the next.
        select: Coordinates to keep, for NetCDF and Zarr: `{"level": [500, 850]}`.
        time: The dim of steps, for NetCDF and Zarr.
        spatial_dims: The number of spatial dims, where the file does not say it.
        dtype: The dtype to which fields are converted.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file cannot be read, lacks a variable, is on another grid than the first, or
            no trajectory is long enough.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        variables: Sequence[str] | None = None,
        trainer: Any = None,
        inputs: int = 1,
        outputs: int = 1,
        every: int = 1,
        select: Mapping[str, Sequence[Any]] | None = None,
        time: str = "time",
        spatial_dims: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _at_least(0, inputs=inputs)
        _at_least(1, outputs=outputs, every=every, spatial_dims=spatial_dims)
        self.dtype = dtype
        paths = [path] if isinstance(path, (str, Path)) else path
        names = [file for each in paths for file in _files(Path(each))]
        self.files = [
            SeriesFile.describe(file, variables, select, time, spatial_dims) for file in names
        ]
        self._marks = [mark_of(file.path) for file in self.files]
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
        where = file, trajectory, start
        return {
            key: slab.entry(
                partial(self._read, key, where), (index, self._marks[number]), self.dtype
            )
            for key, slab in self.slabs.items()
        }

    def _read(
        self, key: str, where: tuple[SeriesFile, int, int], index: Sequence[slice]
    ) -> np.ndarray:
        """Read a part of the channels of one entry."""
        (file, trajectory, start), part = where, index[1:]
        steps = self.inputs if key == "x" else self.targets
        fields = [_fields(file, trajectory, start + step, part, "T") for step in steps]
        fields += [_fields(file, trajectory, 0, part, "")] if key == "x" else []
        values = np.concatenate([f for group in fields for f in group])[index[0]]
        return values.astype(values.dtype.newbyteorder("="))  # NetCDF 3 is big-endian


def _fields(
    file: SeriesFile, trajectory: int, step: int, part: Sequence[slice], dims: str
) -> list[np.ndarray]:
    """Read the variables that vary with time ("T"), or those that do not."""
    return [
        file.read(variable, trajectory, step, part)
        for variable in file.variables
        if ("T" in variable.dims) == bool(dims)
    ]


def _at_least(least: int, **arguments: int) -> None:
    for name, value in arguments.items():
        if value < least:
            raise ValueError(f"{name} must be {least} or more; got {value}.")


def _files(path: Path) -> list[Path]:
    """Return the files of a folder in the order of their names, or the file.

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
        if differ := _differ(file.grid, files[0].grid):
            raise ValueError(
                f"{file.path} has {differ} than {files[0].path}, so channels or rows of one number "
                "would be others; write the files alike, name coordinates in select, or make a "
                "dataset of each."
            )


def _differ(
    grid: Mapping[str, np.ndarray | None], first: Mapping[str, np.ndarray | None]
) -> str | None:
    """Say in what two grids differ; dims of other names, or without coordinates, are let be."""
    if {*grid} == {*first} and [*grid] != [*first]:
        return f"its dims in another order ({', '.join(grid)})"
    for dim, values in grid.items():
        others = first.get(dim)
        if values is None or others is None:
            continue
        same = np.array_equal(values, others)
        if not same and values.dtype.kind in "iuf" and others.dtype.kind in "iuf":
            same = np.allclose(values, others, rtol=0, atol=1e-6 * np.abs(others).max())
        if not same:
            return f"other coordinates along {dim!r} ({values[0]} to {values[-1]})"
    return None


def _words(state: tuple[list[tuple[str, int, bool]], tuple[int, ...]]) -> str:
    variables, extents = state
    names = ", ".join(f"{name} ({count} channels)" for name, count, _ in variables)
    return f"{names} on a grid of {' x '.join(map(str, extents))}"
