"""Whatever is wrong with a file, the error of its reader names the file."""

import pickle
import shutil
import warnings

import h5py
import nibabel
import numpy as np
import pytest
import tifffile
import xarray

from lightning_shard import FieldDataset, SeriesDataset, VolumeDataset, write_fields

VALUES = np.random.default_rng(0).random((4, 6, 5)).astype("f4")
PLACES = (0.01, 0.05, 0.15, 0.3, 0.6, 0.8, 0.97)  # of a file, of which this share comes before


def netcdf(path, engine):
    coordinates = {"time": np.arange(4.0), "lat": np.arange(6.0)}
    states = xarray.Dataset({"x": (("time", "lat", "lon"), VALUES)}, coordinates)
    if engine == "zarr":
        states.to_zarr(path, consolidated=False)
    else:
        states.to_netcdf(path, engine=engine)


def nifti(path):
    nibabel.save(nibabel.Nifti1Image(VALUES, np.eye(4)), path)


def tiff(path):
    tifffile.imwrite(path, VALUES, tile=(16, 16), compression="zlib", photometric="minisblack")


WRITE = {
    "a.h5": (lambda path: write_fields(path, 4, [{"x": VALUES[:, None]}]), FieldDataset),
    "a.zarr": (lambda path: write_fields(path, 4, [{"x": VALUES[:, None]}]), FieldDataset),
    "states.zarr": (lambda path: netcdf(path, "zarr"), SeriesDataset),
    "four.nc": (lambda path: netcdf(path, "h5netcdf"), SeriesDataset),
    "three.nc": (lambda path: netcdf(path, "scipy"), SeriesDataset),
    "a.nii": (nifti, VolumeDataset),
    "a.nii.gz": (nifti, VolumeDataset),
    "a.tif": (tiff, VolumeDataset),
}


def opened(path, dataset):
    options = {"entries": ["x"]} if dataset is FieldDataset else {}
    return dataset({"x": [path]} if dataset is VolumeDataset else path, **options)


def read(path, dataset):
    found = opened(path, dataset)
    return [found[i] for i in range(len(found))]


def cut(data, place):
    return data[: int(len(data) * place)]


def changed(data, place):
    start = int(len(data) * place)
    return data[:start] + bytes(255 - x for x in data[start : start + 8]) + data[start + 8 :]


@pytest.mark.parametrize("damage", [cut, changed])
@pytest.mark.parametrize("name", WRITE)
def test_an_error_names_the_file(name, damage, tmp_path):
    write, dataset = WRITE[name]
    write(tmp_path / name)
    whole = tmp_path / "whole"
    (tmp_path / name).rename(whole)
    held = [file for file in whole.rglob("*") if file.is_file()] or [whole]
    said: list[str] = []
    for file in held:
        for place in PLACES[:: 3 if len(held) > 1 else 1]:
            path = tmp_path / name
            shutil.copytree(whole, path) if whole.is_dir() else shutil.copy(whole, path)
            (path / file.relative_to(whole)).write_bytes(damage(file.read_bytes(), place))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    read(path, dataset)
                except ValueError as error:
                    said.append(str(error))
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert said
    assert all(str(tmp_path / name) in words for words in said)


def test_what_is_no_array_is_named(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["group/x"], file["none"] = VALUES, h5py.Empty("f4")
    for name in ("group", "none"):
        with pytest.raises(ValueError, match=rf"{name} of .*a.h5 must be .* a single value or a g"):
            FieldDataset(tmp_path / "a.h5", [name])


@pytest.mark.parametrize("name", WRITE)
def test_a_relative_path_is_that_of_the_program_when_it_named_it(name, tmp_path, monkeypatch):
    write, dataset = WRITE[name]
    write(tmp_path / name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    found = opened(name, dataset)
    monkeypatch.chdir("elsewhere")
    for each in (found, pickle.loads(pickle.dumps(found))):  # as in this process and in a worker
        assert each[0] is not None
