"""Compares the dims, the times and the coordinates of files of states with what is expected."""

import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_shard.data.readers.field_file import inside
from lightning_shard.data.readers.opened import damaged

_SPACE = ("lat", "latitude", "lon", "longitude", "rlat", "rlon", "x", "y")
_LONGER = 1.5  # than the shortest step; months differ less


def refuse_other_space(path: Path, name: str, dims: Sequence[Any], spatial_dims: int) -> None:
    """Refuse dims of space that would be channels: those before the last `spatial_dims`.

    Raises:
        ValueError: A dim has a name of space, and another one would be split in its place.
    """
    space = dims[-spatial_dims:]
    if others := [dim for dim in dims if str(dim).lower() in _SPACE and dim not in space]:
        raise ValueError(
            f"{name} of {path} has the dims {', '.join(map(str, dims))}, of which the last "
            f"{spatial_dims} are those of space, so {others[0]} would be channels; write it with "
            f"{others[0]} among the last ones, or set spatial_dims."
        )


def check_times(path: Path, time: str, times: np.ndarray) -> None:
    """Compare each time with the one after it, which the next step is taken to be.

    Raises:
        ValueError: They do not increase.
    """
    if not np.all(times[1:] > times[:-1]):
        raise ValueError(
            f"the steps of {path} along {time!r} are not in the order of their times, of which "
            f"each must be later than the one before; sort them, and remove those that are there "
            f"twice (xarray: sortby, drop_duplicates)."
        )
    if times.dtype.kind not in "iufM" or len(times) < 3:
        return
    gaps = times[1:] - times[:-1]
    longer = gaps > _LONGER * gaps.min()
    if longer.any():
        warnings.warn(
            f"{longer.sum()} of the {len(gaps)} steps of {path} along {time!r} are longer than the "
            f"others, the first from {times[:-1][longer][0]} on, and samples span them. If states "
            "are missing there, split the file.",
            stacklevel=4,
        )


def coordinates_of(root: Any, path: Path) -> dict[str, np.ndarray | None]:
    """Return the coordinates of space that a file of the Well or of PDEBench has.

    Raises:
        ValueError: They are outside of the file.
    """
    first = next((name for name in root if "grid" in keys_of(root.get(name))), "")
    group = "dimensions" if "dimensions" in root else f"{first}/grid"
    names = [f"{group}/{name}" for name in keys_of(root.get(group))]
    names += [f"{name}-coordinate" for name in "xyz" if f"{name}-coordinate" in root]
    arrays = {name: inside(root, name, path) for name in names if name.split("/")[-1] != "time"}
    with damaged(f"{path} is damaged", "; restore it."):
        return {
            name.split("/")[-1]: array[()]
            for name, array in arrays.items()
            if len(getattr(array, "shape", ())) == 1
        }


def keys_of(found: Any) -> Collection[str]:
    """Return the names in a group; none of an array."""
    return getattr(found, "keys", dict)()
