"""ERA5 in NetCDF or Zarr, as the Climate Data Store gives it: a part of a state at one time.

Shapes: h of H latitudes, w of W longitudes, C levels.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_shard import SeriesFile, open_series

TIMES, LEVELS = ("valid_time", "time"), ("pressure_level", "level")
LATITUDES, LONGITUDES = ("latitude", "lat"), ("longitude", "lon")
# Aurora's names, and those of the files
NAMES = {"2t": "t2m", "10u": "u10", "10v": "v10"}
STEP_H = 6


class Era5:
    """States of files, six hours apart, of which each rank reads its part.

    Latitudes go from north to south and longitudes from 0 on, as in ERA5.

    Args:
        surface: A file of the surface variables.
        atmospheric: A file of the variables at pressure levels, with the same times.
        static: A file of the variables that stay.
        levels: Pressure levels in hPa.
        names: The name of a variable in the files, where it is not ERA5's.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file cannot be read, or lacks a coordinate, a level or steps of six hours; or
            the files are of other times or places.
    """

    def __init__(
        self,
        surface: str,
        atmospheric: str,
        static: str,
        levels: Sequence[int],
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.paths = {"surface": surface, "atmospheric": atmospheric, "static": static}
        self.levels = tuple(levels)
        self.names = NAMES | dict(names or {})
        opened = open_series(Path(atmospheric))
        self._level = _coordinate(opened, LEVELS, atmospheric)
        self._latitude = _coordinate(opened, LATITUDES, atmospheric)
        self._longitude = _coordinate(opened, LONGITUDES, atmospheric)
        self._time = _coordinate(opened, TIMES, atmospheric)
        self.latitudes = torch.tensor(opened[self._latitude].values, dtype=torch.float64)
        self.longitudes = torch.tensor(opened[self._longitude].values, dtype=torch.float64)
        self._stored_times = opened[self._time].values
        times = self._stored_times.astype("datetime64[s]").astype("int64")
        opened.close()
        self._times: list[int] = times.tolist()
        self._every = _steps_of_six_hours(self._times, atmospheric)
        self.steps: int | None = (len(self._times) - 1) // self._every + 1
        self._described: dict[tuple[str, str], SeriesFile] = {}

    def time(self, step: int) -> datetime:
        """Return the time of a state."""
        seconds = self._times[step * self._every]
        return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)

    def surface(self, name: str, step: int, rows: slice, columns: slice) -> Tensor:
        """Return a part of a surface variable: (h, w)."""
        return self._read("surface", name, step * self._every, (rows, columns))[0]

    def upper(self, name: str, step: int, rows: slice, columns: slice) -> Tensor:
        """Return a part of a variable at all levels: (C, h, w)."""
        return self._read("atmospheric", name, step * self._every, (rows, columns))

    def static(self, name: str) -> Tensor:
        """Return all of a variable that stays: (H, W)."""
        whole = (slice(0, len(self.latitudes)), slice(0, len(self.longitudes)))
        return self._read("static", name, 0, whole)[0]

    def _read(self, kind: str, name: str, step: int, part: Sequence[slice]) -> Tensor:
        file = self._describe(kind, name)
        values = file.read(file.variables[0], 0, step, part)
        return torch.from_numpy(values.astype("float32"))

    def _describe(self, kind: str, name: str) -> SeriesFile:
        """The file, with one variable; on the grid of the others."""
        if (kind, name) not in self._described:
            path, stored = Path(self.paths[kind]), self.names.get(name, name)
            file = SeriesFile.describe(path, [stored], self._select(kind), self._time)
            dims = tuple(file.open()[stored].dims)[-2:]
            grid = (len(self.latitudes), len(self.longitudes))
            if dims != (self._latitude, self._longitude) or file.extents != grid:
                raise ValueError(
                    f"{stored} of {path} must have the dims {self._latitude} and {self._longitude} "
                    f"last, of {grid[0]} x {grid[1]}; got {dims} of "
                    f"{' x '.join(map(str, file.extents))}. Transpose it, or name another file."
                )
            self._refuse_other_places(path, file.open(), kind)
            self._described[kind, name] = file
        return self._described[kind, name]

    def _refuse_other_places(self, path: Path, opened: Any, kind: str) -> None:
        """Refuse other places or times under the numbers of the atmospheric file.

        Raises:
            ValueError: They differ.
        """
        wanted: dict[str, Any] = {
            self._latitude: self.latitudes.numpy(),
            self._longitude: self.longitudes.numpy(),
        }
        if kind != "static":
            wanted[self._time] = self._stored_times
        for name, values in wanted.items():
            found = opened[name].values[: len(values)] if name in opened.coords else values
            same = len(found) == len(values) and np.all(
                np.isclose(found, values, rtol=0, atol=1e-4)
                if values.dtype.kind == "f"
                else found == values
            )
            if not same:
                raise ValueError(
                    f"{path} has other values of {name} ({found[0]} to {found[-1]}) than "
                    f"{self.paths['atmospheric']} ({values[0]} to {values[-1]}), so states of one "
                    "number would be of others; select the same ones from both."
                )

    def _select(self, kind: str) -> dict[str, list[int]] | None:
        return {self._level: list(self.levels)} if kind == "atmospheric" else None


def _coordinate(opened: Any, names: Sequence[str], path: str) -> str:
    for name in names:
        if name in opened.coords and opened[name].ndim == 1:
            return name
    raise ValueError(
        f"{path} must have a coordinate {' or '.join(names)}; it has "
        f"{sorted(map(str, opened.coords))}. Rename one, or name another file."
    )


def _steps_of_six_hours(times: Sequence[int], path: str) -> int:
    """Count the steps of a file in six hours."""
    gaps = {b - a for a, b in pairwise(times)}
    gap = gaps.pop() if len(gaps) == 1 else 0
    if gap <= 0 or STEP_H * 3600 % gap:
        raise ValueError(
            f"{path} must have even steps, of which some make {STEP_H} hours; got "
            f"{len(times)} times {sorted(gaps | {gap})} s apart. Select times from it."
        )
    return STEP_H * 3600 // gap
