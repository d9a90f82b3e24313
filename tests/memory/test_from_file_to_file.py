"""Fields that lie in files go through a network in tiles, and into files; little is in memory."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import h5py
import nibabel
import numpy as np
import pytest
import tifffile
import torch
import zarr
from torch import nn

from lightning_shard import FieldFile, ImageFile, VolumeFile, in_tiles, write_fields
from lightning_shard.data.field_sink import FieldSink
from tests.parity import assert_same

VALUES = np.random.default_rng(0).standard_normal((2, 3, 37, 26)).astype("float32")


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Conv2d(4, 2, 3, padding=1), nn.Upsample(scale_factor=2))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        y = self.layers(x)
        return {
            "field": y,
            "classes": y.argmax(1),
            "mean": y.mean((1, 2, 3)),
            "both": (y + 1, y[:, :1]),
        }


@pytest.fixture
def source(tmp_path):
    write_fields(tmp_path / "in.zarr", 2, [{"x": VALUES}])
    return FieldFile(tmp_path / "in.zarr")


@pytest.mark.parametrize("tiles", [1, 3, (2, 2)])
def test_equals_the_whole_fields(tiles, source, tmp_path):
    one, tiled = network(), network()
    with torch.inference_mode():
        wanted = torch.cat([one(torch.from_numpy(x)[None]) for x in VALUES])
        files = {"source": source, "sink": tmp_path / "out.zarr", "tile_memory": tmp_path}
        with in_tiles(tiled, tiles, **files) as fields:
            assert [tiled(field) for field in fields] == [tmp_path / "out.zarr"] * 2
    assert_same(torch.from_numpy(zarr.open(tmp_path / "out.zarr")["prediction"][:]), wanted)
    assert_same(tiled[1].running_mean, one[1].running_mean)
    assert {path.name for path in tmp_path.iterdir()} == {"in.zarr", "out.zarr"}


@pytest.mark.parametrize("name", ["out.zarr", "out.h5", "out"])
def test_several_threads_write_one_file(name, tmp_path):
    one = network().eval()
    values = np.random.default_rng(1).standard_normal((8, 3, 19, 12)).astype("float32")
    write_fields(tmp_path / "in.zarr", 8, [{"x": values}])
    files = {"source": FieldFile(tmp_path / "in.zarr"), "sink": tmp_path / name}
    with torch.inference_mode():
        wanted = one(torch.from_numpy(values))
    with in_tiles(one, 2, **files) as fields, ThreadPoolExecutor(4) as threads:
        assert {*threads.map(torch.inference_mode()(one), fields)} == {tmp_path / name}
    if name == "out":
        found = torch.stack([torch.load(tmp_path / name / f"{n:06d}.pt") for n in range(8)])
    else:
        opened = zarr.open if name == "out.zarr" else h5py.File
        found = torch.from_numpy(opened(tmp_path / name)["prediction"][:])
    assert_same(found, wanted)


def test_a_result_lies_where_its_sample_lay(source, tmp_path):
    one = network().eval()
    files = {"source": source, "sink": tmp_path / "out.zarr"}
    with torch.inference_mode():
        wanted = torch.cat([one(torch.from_numpy(x)[None]) for x in VALUES])
        with in_tiles(one, 2, **files) as fields:
            for field in reversed(fields):
                one(field)
    assert_same(torch.from_numpy(zarr.open(tmp_path / "out.zarr")["prediction"][:]), wanted)


@pytest.mark.parametrize("end", ["out.h5", "out.zarr", "out.tif", "out"])
def test_results_of_several_kinds(end, source, tmp_path):
    module = Named()
    with torch.inference_mode():
        wanted = [module(torch.from_numpy(x)[None]) for x in VALUES]
        module = Named()
        if end == "out.tif":
            module.forward = lambda x: {
                "field": module.layers(x),
                "classes": module.layers(x).argmax(1),
            }
        with in_tiles(module, 3, source=source, sink=tmp_path / end) as fields:
            for field in fields:
                module(field)
    for number, want in enumerate(wanted):
        if end == "out.tif":
            read = {
                n: tifffile.imread(tmp_path / f"out_{n}_{number:06d}.tif")
                for n in ("field", "classes")
            }
        elif end == "out":
            read = torch.load(tmp_path / end / f"{number:06d}.pt", weights_only=True)
        else:
            root = h5py.File(tmp_path / end) if end == "out.h5" else zarr.open(tmp_path / end)
            names = ("field", "classes", "mean", "both/0", "both/1")
            read = {name: root[name][number] for name in names}
        for name, value in read.items():
            key, *place = name.split("/")
            expected = want[key][int(place[0])] if place else want[key]
            assert_same(torch.as_tensor(np.asarray(value)), expected[0])


def test_volumes_and_pictures_are_sources(tmp_path):
    volume = VALUES[0].transpose(1, 2, 0).copy()
    affine = np.diag([2.0, 2, 3, 1])
    nibabel.save(nibabel.Nifti1Image(volume, affine), tmp_path / "in.nii.gz")
    tifffile.imwrite(tmp_path / "in.tif", VALUES[0], photometric="minisblack")
    layers, flat = nn.Conv3d(1, 1, 3, padding=1), nn.Conv2d(3, 1, 3, padding=1)
    with torch.inference_mode():
        with in_tiles(
            layers, 3, source=VolumeFile(tmp_path / "in.nii.gz"), sink=tmp_path / "out.nii.gz"
        ) as x:
            layers(x[0])
        assert (nibabel.load(tmp_path / "out.nii.gz").affine == affine).all()
        found = np.asanyarray(nibabel.load(tmp_path / "out.nii.gz").dataobj)
        assert_same(torch.from_numpy(found), layers(torch.from_numpy(volume)[None, None])[0, 0])
        with in_tiles(flat, 3, source=[ImageFile(tmp_path / "in.tif")]) as x:
            assert_same(flat(x[0]), flat(torch.from_numpy(VALUES[:1])))


def test_values_have_the_dtype_of_the_parameters(tmp_path):
    write_fields(tmp_path / "in.h5", 1, [{"values": VALUES[:1].astype("float64")}])
    for dtype in (torch.float32, torch.float64):
        module = network().to(dtype)
        with torch.inference_mode(), in_tiles(module, 2, source=FieldFile(tmp_path / "in.h5")) as x:
            assert module(x[0]).dtype == dtype


def test_an_imaginary_part_is_not_lost(tmp_path):
    write_fields(tmp_path / "in.h5", 1, [{"values": VALUES[:1].astype("complex64")}])
    source = FieldFile(tmp_path / "in.h5")
    with (
        torch.inference_mode(),
        in_tiles(network(), 2, source=source) as fields,
        pytest.raises(ValueError, match=r"complex numbers, of which torch\.float32 keeps no imag"),
    ):
        fields[0].tensor  # noqa: B018 - it is read


def run_all(module, calls, files):
    with in_tiles(module, 2, **files) as fields:
        for call in range(calls):
            module(fields[call % len(fields)])


def test_mistakes(source, tmp_path):
    module = network()
    with torch.inference_mode():
        with pytest.raises(ValueError, match="sink takes the results of a source's samples"):
            in_tiles(module, 2, sink=tmp_path / "out.zarr").__enter__()
        with pytest.raises(TypeError, match="source must be a FieldFile"):
            in_tiles(module, 2, source=VALUES).__enter__()
        files = {"source": source, "sink": tmp_path / "out.zarr"}
        with pytest.raises(RuntimeError, match="one result of each of 2 samples"):
            run_all(module, 3, files)
        assert {path.name for path in tmp_path.iterdir()} == {"in.zarr"}  # nothing half is left
        with pytest.raises(ValueError, match="is not a tensor with one sample"):
            run_all(nn.Sequential(module, nn.Flatten(0)), 1, files)
    write_fields(tmp_path / "two.zarr", 2, [{"a": VALUES, "b": VALUES}])
    with pytest.raises(ValueError, match="holds a, b; name the array that is read x"):
        in_tiles(module, 2, source=FieldFile(tmp_path / "two.zarr")).__enter__()


def test_a_block_that_several_parts_would_share_is_not_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_shard.data.field_sink.MOST_BYTES", 64)
    sink = FieldSink(tmp_path / "x.zarr")
    from lightning_shard.data.field_sink import Field

    sink.begin()
    sink.add("x", Field(1, (2, 12, 10), np.dtype("float32")), (2, 4, 10))
    assert sink._root["x"].chunks == (1, 2, 4, 2)
    sink.abandon()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_a_field_larger_than_memory(tmp_path):
    """The network keeps 1.3 GiB of a picture in one process, and 250 MiB are enough in tiles."""
    words = ["--pixels", "2048", "--tiles", "16", "--limit", "250", "--width", "8"]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.file_to_file", *words]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--compare"],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rpartition(": ")[2].split()[0]) < 1e-5
    assert {path.name for path in tmp_path.iterdir()} == {"in.zarr", "out.zarr"}
