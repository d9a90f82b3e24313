"""Windows of made-up weather and of ERA5's files: each rank reads its part of each state."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray

import lightning_shard
from lightning_modules import AuroraDataModule
from lightning_shard.data.split import shard_batch
from tests import training
from tests.data.readers.test_fields import split_by
from tests.parity import mesh_of

aurora = pytest.importorskip("aurora", reason="microsoft-aurora is not installed")

H, W, T = 9, 8, 26  # hourly
LEVELS = [300, 500, 850]
RANDOM = np.random.default_rng(0).standard_normal


def written(folder, **coordinates):
    """Files as the Climate Data Store gives them."""
    latitudes = coordinates.get("latitude", np.linspace(90, -90, H))
    where = {"latitude": latitudes, "longitude": np.arange(W) * (360 / W)}
    when = {"valid_time": np.datetime64("2021-03-01", "ns") + np.arange(T) * np.timedelta64(1, "h")}
    when |= {key: value for key, value in coordinates.items() if key == "valid_time"}

    def fields(names, dims, extents):
        return {name: (dims, RANDOM(extents).astype("f4")) for name in names}

    grid = ("latitude", "longitude")
    steps = len(when["valid_time"])
    surface = fields(("t2m", "u10", "v10", "msl"), ("valid_time", *grid), (steps, H, W))
    upper = fields("zuvtq", ("valid_time", "pressure_level", *grid), (steps, 3, H, W))
    files = {
        "surface": xarray.Dataset(surface, where | when),
        "atmospheric": xarray.Dataset(upper, where | when | {"pressure_level": LEVELS}),
        "static": xarray.Dataset(fields(("lsm", "z", "slt"), grid, (H, W)), where),
    }
    for name, dataset in files.items():
        dataset.to_netcdf(folder / f"{name}.nc", engine="h5netcdf")
    return {name: str(folder / f"{name}.nc") for name in files}


def ready(trainer=None, **options):
    made = AuroraDataModule(num_val=0, num_test=0, levels=[500, 850], steps=1, **options)
    made.trainer = trainer
    made.setup("fit")
    return made.datasets["train"]


@pytest.mark.spmd(2)
def test_parts_of_files_are_those_of_the_whole_states():
    folder = training.shared_path("era5")
    paths = {name: str(folder / f"{name}.nc") for name in ("surface", "atmospheric", "static")}
    if dist.get_rank() == 0:
        folder.mkdir()
        written(folder)
    dist.barrier()
    whole, dataset = ready(**paths), ready(split_by(-2), **paths)
    assert len(whole) == len(dataset) == 3  # of five states, six hours apart
    assert_parts(dataset, whole)
    stored = xarray.open_dataset(paths["atmospheric"], engine="h5netcdf")["q"].values
    batch = whole.collate([whole[1]])
    assert np.array_equal(batch.atmos_vars["q"][0].numpy(), stored[[6, 12, 18]][:, 1:])
    assert str(batch.metadata.time[0]) == "2021-03-01 12:00:00"


@pytest.mark.spmd(2)
def test_parts_of_made_up_weather_are_those_of_the_whole_states():
    assert_parts(ready(split_by(-2), resolution=(9, 8)), ready(resolution=(9, 8)))


def assert_parts(dataset, whole):
    batch, expected = (each.collate([each[0], each[2]]) for each in (dataset, whole))
    assert dataset[0]["surf_vars"]["2t"].tensor.shape[-2] == H // 2 + (dist.get_rank() == 0)
    split = shard_batch(batch.to("cpu"), mesh_of(2), -2)
    for kind in ("surf_vars", "atmos_vars", "static_vars"):
        for name, value in getattr(expected, kind).items():
            found = getattr(split, kind)[name]
            assert lightning_shard.gather(found).equal(value), name


def test_made_up_weather_is_smooth_and_does_not_repeat():
    dataset = ready(resolution=(33, 64), num_train=8)
    fields = torch.stack([dataset[i]["surf_vars"]["2t"] for i in range(8)])
    assert fields[0, 1].equal(fields[1, 0])  # windows overlap
    change = (fields[1:, 0] - fields[:-1, 0]).std() / fields.std()
    assert 0.01 < change < 0.4
    assert torch.allclose(fields[..., 0, :], fields[..., 0, :1], rtol=1e-4)  # a pole is a point


def test_sets_have_no_state_in_common():
    made = AuroraDataModule(num_train=5, num_val=2, num_test=3, steps=2)
    made.setup("fit")
    seen = {
        name: {state for start in each.starts for state in range(start, start + 4)}
        for name, each in made.datasets.items()
    }
    assert not seen["train"] & seen["val"]
    assert not seen["val"] & seen["test"]


def test_files_that_do_not_fit_are_refused(tmp_path):
    paths = written(tmp_path)
    with pytest.raises(ValueError, match=r"9 training, .* need 11 states; the files have 5"):
        ready(**paths, num_train=9)
    with pytest.raises(ValueError, match="atmospheric and static is missing"):
        AuroraDataModule(surface=paths["surface"])
    with pytest.raises(FileNotFoundError, match=r"fields nowhere\.nc does not exist"):
        ready(**paths | {"atmospheric": "nowhere.nc"})
    with pytest.raises(ValueError, match="has no variable 'wind'"):
        ready(**paths, names={"10u": "wind"})[0]
    times = np.datetime64("2021-03-01", "ns") + np.arange(4) * np.timedelta64(4, "h")
    (tmp_path / "four").mkdir()
    with pytest.raises(ValueError, match="must have even steps, of which some make 6 hours"):
        ready(**written(tmp_path / "four", valid_time=times))
