"""Files of ERA5 that do not belong together are refused, also where Aurora is not installed."""

import numpy as np
import pytest
import xarray

from lightning_modules.aurora.era5 import Era5

H, W, T = 5, 8, 3
GRID = ("latitude", "longitude")
HOURS = np.datetime64("2021-03-01", "ns") + 6 * np.arange(T) * np.timedelta64(1, "h")


def era5(folder, **changed):
    """Three files, of which one may have other coordinates."""
    where = {"latitude": np.linspace(90, -90, H), "longitude": np.arange(W) * (360 / W)}
    when = where | {"valid_time": HOURS}
    levels = when | {"pressure_level": [500, 850]}
    datasets = {
        "surface": xarray.Dataset({"t2m": (("valid_time", *GRID), np.zeros((T, H, W)))}, when),
        "atmospheric": xarray.Dataset(
            {"t": (("valid_time", "pressure_level", *GRID), np.zeros((T, 2, H, W)))}, levels
        ),
        "static": xarray.Dataset({"lsm": (GRID, np.zeros((H, W)))}, where),
    }
    for name, dataset in datasets.items():
        changed.get(name, lambda x: x)(dataset).to_netcdf(folder / f"{name}.nc", engine="h5netcdf")
    return Era5(**{name: str(folder / f"{name}.nc") for name in datasets}, levels=[500])


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("surface", lambda x: x, None),
        ("surface", lambda x: x.assign_coords(valid_time=HOURS + np.timedelta64(1, "h")), "time"),
        ("surface", lambda x: x.isel(valid_time=slice(1, None)), "valid_time"),
        ("surface", lambda x: x.isel(latitude=slice(None, None, -1)), "latitude"),
        ("static", lambda x: x.roll(longitude=4, roll_coords=True), "longitude"),
        ("static", lambda x: x.assign_coords(latitude=x.latitude.astype("f4")), None),
    ],
)
def test_files_of_other_times_or_places(kind, change, words, tmp_path):
    source, whole = era5(tmp_path, **{kind: change}), (slice(0, H), slice(0, W))

    def read():
        return source.surface("2t", 0, *whole) if kind == "surface" else source.static("lsm")

    if words is None:
        assert read().shape == (H, W)
    else:
        with pytest.raises(ValueError, match=rf"{kind}.nc has other values of .*{words}"):
            read()
