"""Reads files of simulations and weather: a part of a variable at one time.

Known are HDF5 files of the Well and of PDEBench, and what xarray opens: NetCDF and Zarr.

Shapes: N trajectories of T steps in one file, C components of a variable.
References: the Well's page "Data format"; Takamoto et al., "PDEBench", 2022.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_shard.data.readers.field_file import HDF5, ZARR, inside, no_gaps_read, open_hdf5
from lightning_shard.data.readers.opened import OpenFile, damaged, optional
from lightning_shard.data.readers.series_grid import (
    check_times,
    coordinates_of,
    keys_of,
    refuse_other_space,
)

NETCDF = (".nc", ".nc4", ".netcdf")

# PDEBench's files do not name the dims of their arrays
_PDEBENCH = {
    "tensor": "NTS", "density": "NTS", "pressure": "NTS", "Vx": "NTS", "Vy": "NTS", "Vz": "NTS",
    "velocity": "NTSC", "particles": "NTSC", "force": "NSC", "nu": "NS", "data": "TSC",
}  # fmt: skip


@dataclass(frozen=True)
class Variable:
    """The place of a field in an array of a file.

    Attributes:
        name: The name of the array, with that of its group: "t0_fields/density".
        dims: A letter for each of its dims: N (trajectory), T (step), C (components), S (space);
            and - for a spatial dim that the array lacks, since the field is constant along it.
        shape: The extent of each of these dims, 1 for those that it lacks.
    """

    name: str
    dims: str
    shape: tuple[int, ...]

    @property
    def components(self) -> int:
        """The number C of components, over all dims of components."""
        return math.prod(self.extents("C"))

    def extents(self, dims: str) -> list[int]:
        """Return the extents of the dims with one of these letters."""
        return [n for dim, n in zip(self.dims, self.shape, strict=True) if dim in dims]

    def read(self, array: Any, trajectory: int, step: int, part: Sequence[slice]) -> np.ndarray:
        """Read `(C, *part)` of one step of one trajectory.

        Args:
            array: The open array.
            trajectory: Its number in the file.
            step: Its number in the trajectory.
            part: Rows along each spatial dim.

        Raises:
            ValueError: The array has another shape.
        """
        rows = iter(part)
        index = {i: next(rows) for i, dim in enumerate(self.dims) if dim in "S-"}
        places: dict[str, Any] = {"N": trajectory, "T": step, "C": slice(None)}
        stored = [i for i, dim in enumerate(self.dims) if dim != "-"]
        if tuple(array.shape) != (expected := tuple(self.shape[i] for i in stored)):
            raise ValueError(
                f"it has the shape {tuple(array.shape)}, and that of the first trajectory is "
                f"{expected}"
            )
        values = np.asarray(array[tuple(index.get(i, places.get(self.dims[i])) for i in stored)])
        kept = [i for i, dim in enumerate(self.dims) if dim in "CS-"]
        values = np.expand_dims(values, tuple(n for n, i in enumerate(kept) if self.dims[i] == "-"))
        inner = [n for n, i in enumerate(kept) if self.dims[i] == "C"]
        values = np.moveaxis(values, inner, range(len(inner)))
        found = (self.components, *(r.stop - r.start for r in part))
        lacking = [self.dims[i] == "-" for i in index]
        wanted = (found[0], *(1 if none else n for none, n in zip(lacking, found[1:], strict=True)))
        return np.broadcast_to(values.reshape(wanted), found)


@dataclass(frozen=True)
class SeriesFile:
    """A file of simulations or weather, made by `SeriesFile.describe`; it travels to workers.

    Attributes:
        path: The file.
        variables: The variables that were asked for, in that order.
        trajectories: The number N.
        steps: The number T of steps of each trajectory.
        extents: The extents of the spatial dims.
        seeds: The group of each trajectory, if they have groups of their own.
        grid: The dims of channels and of space by name, and the coordinates along them, where the
            file has any.
        open: Returns the open file of this process: the root of HDF5, or an `xarray.Dataset`.

    Example:
        >>> file = SeriesFile.describe("era5.zarr", ["geopotential"], {"level": [500, 850]})
        >>> file.extents  # (721, 1440)
        >>> file.read(file.variables[0], 0, 7, (slice(0, 181), slice(0, 1440)))  # (2, 181, 1440)
    """

    path: Path
    variables: tuple[Variable, ...]
    trajectories: int
    steps: int
    extents: tuple[int, ...]
    seeds: tuple[str, ...]
    open: OpenFile
    grid: Mapping[str, np.ndarray | None]

    def read(
        self, variable: Variable, trajectory: int, step: int, part: Sequence[slice]
    ) -> np.ndarray:
        """Read `(C, *part)` of a variable at one step of one trajectory.

        Raises:
            ValueError: It is damaged, or outside of the file.
        """
        opened = self.open()
        name = f"{self.seeds[trajectory]}/{variable.name}" if self.seeds else variable.name
        what = f"step {step} of trajectory {trajectory} of {name} in {self.path} cannot be read"
        with damaged(what, "; restore the file."):
            array = inside(opened, name, self.path) if self.path.suffix in HDF5 else opened[name]
            return variable.read(array, trajectory, step, part)

    @classmethod
    def describe(
        cls,
        path: str | Path,
        names: Sequence[str] | None = None,
        select: Mapping[str, Sequence[Any]] | None = None,
        time: str = "time",
        spatial_dims: int = 2,
    ) -> "SeriesFile":
        """Find what a file holds.

        Args:
            path: The file.
            names: The names of the variables; by default all that vary with time.
            select: Coordinates to keep, for NetCDF and Zarr: `{"level": [500, 850]}`.
            time: The dim of steps, for NetCDF and Zarr.
            spatial_dims: The number of spatial dims, where the file does not say it.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It cannot be read, lacks a variable, or its variables do not fit together.
        """
        path, seeds = Path(path).absolute(), ()
        opened = open_series(path, select)
        try:
            coordinates = getattr(opened, "coords", {})
            grid: dict[str, np.ndarray | None] = (
                coordinates_of(opened, path) if path.suffix in HDF5 else {}
            )
            if path.suffix not in HDF5:
                found = _of_xarray(opened, time, spatial_dims)
            elif "n_spatial_dims" in opened.attrs:
                found = _of_the_well(opened, path)
            else:
                found, seeds = _of_pdebench(opened, path, spatial_dims)
        finally:
            opened.close()
        if names is None:
            varying = [name for name, variable in found.items() if "T" in variable.dims]
            names = [name for name in varying if name not in coordinates]
        if missing := [name for name in names if name not in found]:
            raise ValueError(f"{path} has no variable {missing[0]!r}; it has {sorted(found)}.")
        if not names:
            raise ValueError(
                f"{path} has no variable that varies along {time!r}; it has {sorted(found)}. Name "
                "the dim of steps, or variables."
            )
        if path.suffix not in HDF5:
            dims = {name: [d for d in opened[name].dims if d != time] for name in names}
            for name, found_dims in dims.items():
                refuse_other_space(path, name, found_dims, spatial_dims)
            every = [dim for each in dims.values() for dim in each]
            grid = {d: coordinates[d].values if d in coordinates else None for d in every}
            _only(path, names, "spatial dims", {tuple(d[-spatial_dims:]) for d in dims.values()})
            if time in coordinates and coordinates[time].ndim == 1:
                check_times(path, time, coordinates[time].values)
        variables = [found[name] for name in names]
        extents = _extents(path, variables)
        trajectories = len(seeds) or _of_all(path, variables, "numbers of trajectories", "N")
        steps = _of_all(path, variables, "numbers of steps", "T")
        opener = OpenFile(functools.partial(open_series, path, select))
        return cls(path, tuple(variables), trajectories, steps, extents, seeds, opener, grid)


def open_series(path: str | Path, select: Mapping[str, Sequence[Any]] | None = None) -> Any:
    """Open a file: the root of HDF5, or an xarray.Dataset that reads what is indexed.

    Args:
        path: The file.
        select: Coordinates to keep, for NetCDF and Zarr: `{"level": [500, 850]}`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, of another format, or without these coordinates.
    """
    path = Path(path)
    known = HDF5 + ZARR + NETCDF
    if not path.exists():
        raise FileNotFoundError(f"the file of fields {path} does not exist; check its name.")
    if path.suffix not in known:
        raise ValueError(f"{path} must end in {', '.join(known)}, which say its format.")
    if select and path.suffix in HDF5:
        raise ValueError(
            f"select={select} names coordinates, but {path} is HDF5, which is read without them; "
            "leave select out, or name variables."
        )
    try:
        opened = open_hdf5(path) if path.suffix in HDF5 else _open_xarray(path)
        for dim in select or ():
            if "calendar" in getattr(opened.get(dim), "attrs", ()):
                raise ValueError(
                    f"select={select} names times of {path}, of whose calendar "
                    f"({opened[dim].calendar}) numpy knows nothing; pip install cftime, or leave "
                    f"{dim!r} out of select."
                )
        chosen = opened.sel(select) if select else opened
    except (OSError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    for dim in select or ():
        if chosen.sizes.get(dim) == 0:
            ends = opened[dim].values[[0, -1]]
            raise ValueError(
                f"select={select} keeps nothing of {path} along {dim!r}, which goes from {ends[0]} "
                f"to {ends[1]}; give the ends of a slice in this order."
            )
    return chosen


def _open_xarray(path: Path) -> Any:
    xarray = optional("xarray", f"the file {path}", "xarray")
    engine = "zarr"
    if path.suffix in NETCDF:
        engine = "scipy"  # NetCDF 3
        if _begins_with(path, b"\x89HDF"):
            open_hdf5(path).close()  # it refuses arrays outside of the file
            engine = "h5netcdf"
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as opening:
            warnings.filterwarnings("ignore", "Failed to open Zarr store with consolidated")
            if engine == "zarr":
                opening.enter_context(no_gaps_read(optional("zarr", f"the file {path}", "zarr")))
            try:
                return xarray.open_dataset(path, engine=engine, cache=False)
            except ValueError:  # times of a calendar that needs cftime stay numbers
                return xarray.open_dataset(path, engine=engine, cache=False, decode_times=False)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # each codec has errors of its own
        raise OSError(error) from error


def _extents(path: Path, variables: Sequence[Variable]) -> tuple[int, ...]:
    """Return the extents of the grid on which all variables lie."""
    names = [variable.name for variable in variables]
    space = _only(path, names, "numbers of spatial dims", {len(v.extents("S-")) for v in variables})
    found = [
        {v.extents("S-")[i] for v in variables if [d for d in v.dims if d in "S-"][i] == "S"}
        for i in range(space)
    ]
    return tuple(_only(path, names, f"extents of spatial dim {i}", n) for i, n in enumerate(found))


def _of_all(path: Path, variables: Sequence[Variable], what: str, dims: str) -> int:
    """Return the extent that all variables have along a dim; 1 where none has it."""
    extents = {n for variable in variables for n in variable.extents(dims)}
    return _only(path, [variable.name for variable in variables], what, extents or {1})


def _only(path: Path, names: Sequence[str], what: str, found: Collection[Any]) -> Any:
    """Return the one value that all variables have.

    Raises:
        ValueError: They have several.
    """
    if len(found) != 1:
        raise ValueError(
            f"the variables {', '.join(names)} of {path} have different {what}: "
            f"{', '.join(map(str, sorted(found)))}; name variables of one grid."
        )
    return next(iter(found))


def _of_xarray(opened: Any, time: str, spatial_dims: int) -> dict[str, Variable]:
    """Find numbers with enough dims; those before the spatial ones are components."""
    found: dict[str, Variable] = {}
    for name, array in opened.variables.items():
        others = [dim for dim in array.dims if dim != time]
        space = others[len(others) - spatial_dims :] if len(others) >= spatial_dims else []
        dims = "".join("T" if d == time else "S" if d in space else "C" for d in array.dims)
        if space and array.dtype.kind in "biufc":
            found[str(name)] = Variable(str(name), dims, tuple(array.shape))
    return found


def _of_the_well(root: Any, path: Path) -> dict[str, Variable]:
    """Find scalar, vector and tensor fields."""
    space = int(root.attrs["n_spatial_dims"])
    found: dict[str, Variable] = {}
    for order, group in enumerate(("t0_fields", "t1_fields", "t2_fields")):
        names = inside(root, group, path).attrs["field_names"] if group in root else []
        for name in (n.decode() if isinstance(n, bytes) else str(n) for n in names):
            array = inside(root, f"{group}/{name}", path)
            along = "".join("S" if varies else "-" for varies in array.attrs["dim_varying"])
            before = "N" * bool(array.attrs["sample_varying"])
            dims = before + "T" * bool(array.attrs["time_varying"]) + along + "C" * order
            if len(along) != space or len(dims.replace("-", "")) != array.ndim:
                raise ValueError(
                    f"{group}/{name} of {path} has the shape {array.shape}, which its attributes "
                    f"do not describe; restore the file."
                )
            sizes = iter(array.shape)
            shape = tuple(1 if dim == "-" else next(sizes) for dim in dims)
            found[name] = Variable(f"{group}/{name}", dims, shape)
    return found


def _of_pdebench(
    root: Any, path: Path, spatial_dims: int
) -> tuple[dict[str, Variable], tuple[str, ...]]:
    """Find arrays with names of PDEBench, at the root or in a group for each trajectory."""
    seeds = tuple(sorted(name for name in root if "data" in keys_of(root[name])))
    group = inside(root, seeds[0], path) if seeds else root
    grid = group.get("grid", group)
    space = sum(name in grid or f"{name}-coordinate" in grid for name in "xyz") or spatial_dims
    found: dict[str, Variable] = {}
    for name in group:
        dims = _PDEBENCH.get(name, "").replace("S", "S" * space)
        shape = tuple(getattr(group[name], "shape", ()))
        if dims and len(dims) != len(shape):
            raise ValueError(
                f"{name} of {path} has the shape {shape}; PDEBench gives it {len(dims)} dims for "
                f"{space} of space. Name other variables, or set spatial_dims."
            )
        if dims:
            found[name] = Variable(name, dims, shape)
    return found, seeds


def _begins_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start
