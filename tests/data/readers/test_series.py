"""Files of the layouts that other programs write: each rank reads its part of each state."""

import contextlib
import importlib.util
import multiprocessing

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, default_collate

import lightning_shard
from lightning_modules import SeriesDataModule
from lightning_shard import SeriesDataset
from lightning_shard.data.split import shard_batch
from tests import training
from tests.data.readers.test_fields import split_by
from tests.parity import mesh_of

N, T, H, W = 2, 5, 7, 6
STATE = np.random.default_rng(0).standard_normal((N, T, 2, H, W)).astype("f4")
STILL = np.random.default_rng(1).standard_normal((H, W)).astype("f4")


def the_well(path, state=STATE):
    """Density and a vector, a constant field, one that is constant along the second dim."""
    with h5py.File(path, "w") as file:
        file.attrs["n_spatial_dims"] = 2
        fields = {
            "t0_fields/density": (state[:, :, 0], True, True, [True, True]),
            "t0_fields/depth": (STILL, False, False, [True, True]),
            "t0_fields/wind": (state[:, :, 0, :, 0], True, True, [True, False]),
            "t1_fields/velocity": (np.moveaxis(state, 2, -1), True, True, [True, True]),
        }
        for name, (values, sample, time, dims) in fields.items():
            file[name] = values
            file[name].attrs.update(sample_varying=sample, time_varying=time, dim_varying=dims)
        for group, names in (
            ("t0_fields", ["density", "depth", "wind"]),
            ("t1_fields", ["velocity"]),
        ):
            file[group].attrs["field_names"] = names


def pdebench(path):
    """Compressible flow."""
    with h5py.File(path, "w") as file:
        file["density"], file["Vx"] = STATE[:, :, 0], STATE[:, :, 1]
        file["x-coordinate"], file["y-coordinate"] = np.arange(H), np.arange(W)
        file["t-coordinate"] = np.arange(T + 1)


def pdebench_seeds(path):
    """Reaction and diffusion: a group for each trajectory."""
    with h5py.File(path, "w") as file:
        for seed in range(N):
            file[f"{seed:04}/data"] = np.moveaxis(STATE[seed], 1, -1)
            file[f"{seed:04}/grid/x"] = np.arange(H)
            file[f"{seed:04}/grid/y"] = np.arange(W)


def weather():
    """One trajectory: a variable of two levels, one without levels, and the height of the land."""
    dims = ("time", "level", "latitude", "longitude")
    return xarray.Dataset(
        {
            "z": (dims, STATE[0]),
            "t2m": (("time", "latitude", "longitude"), STATE[1, :, 0]),
            "land": (("latitude", "longitude"), STILL),
            "sun": (("time",), np.arange(T)),
        },
        {"level": [500, 850], "time": np.arange(T)},
    )


def netcdf4(path):
    packed = {"z": {"dtype": "f8", "scale_factor": 0.5, "add_offset": 3.0}}
    weather().to_netcdf(path, engine="h5netcdf", encoding=packed)


WRITE = {
    "well.hdf5": the_well,
    "pdebench.h5": pdebench,
    "seeds.h5": pdebench_seeds,
    "new.nc": netcdf4,
    "old.nc": lambda path: weather().to_netcdf(path, engine="scipy"),
    "store.zarr": lambda path: weather().to_zarr(path, consolidated=False),
}


def written(name):
    """A file, made by the first rank."""
    path = training.shared_path(name)
    if dist.get_rank() == 0:
        WRITE[name](path)
    dist.barrier()
    return path


# the variables by name, and the state of trajectory n at step t that they are
KINDS = {
    "well.hdf5": (["density", "velocity"], lambda n, t: [STATE[n, t, 0], *STATE[n, t]]),
    "pdebench.h5": (
        None,
        lambda n, t: [STATE[n, t, 1], STATE[n, t, 0]],
    ),  # by the order of the file
    "seeds.h5": (None, lambda n, t: STATE[n, t]),
    "new.nc": (["z", "t2m"], lambda n, t: [*STATE[0, t], STATE[1, t, 0]]),
    "old.nc": (["t2m", "z"], lambda n, t: [STATE[1, t, 0], *STATE[0, t]]),
    "store.zarr": (["z"], lambda n, t: STATE[0, t]),
}


@pytest.mark.slow_rows("new.nc")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", KINDS)
def test_parts_are_those_of_the_whole_states(name):
    variables, state = KINDS[name]
    dataset = SeriesDataset(written(name), variables, split_by(None), inputs=2)
    trajectories = 1 if name.endswith(("nc", "zarr")) else N
    assert len(dataset) == trajectories * (T - 2)
    for sample in range(len(dataset)):
        n, start = divmod(sample, T - 2)
        wanted = {
            "x": np.stack([*state(n, start), *state(n, start + 1)]),
            "y": np.stack([*state(n, start + 2)]),
        }
        assert_sample(dataset, sample, wanted)


def assert_sample(dataset, sample, wanted):
    """The ranks' parts are smaller than the whole, and together they are the whole."""
    batch = shard_batch(default_collate([dataset[sample]]), mesh_of(2), None)
    for key, value in wanted.items():
        assert dataset[sample][key].tensor.shape[1:] == (H // 2 + (dist.get_rank() == 0), W)
        found = lightning_shard.gather(batch[key])[0].numpy()
        np.testing.assert_allclose(found, value, rtol=1e-6)


@pytest.mark.spmd(2)
def test_constant_variables_are_inputs_once():
    variables = ["velocity", "depth"]
    dataset = SeriesDataset(written("well.hdf5"), variables, split_by(None), inputs=2, every=2)
    wanted = {"x": np.stack([*STATE[1, 0], *STATE[1, 2], STILL]), "y": STATE[1, 4]}
    assert len(dataset) == N
    assert_sample(dataset, 1, wanted)
    dataset = SeriesDataset(written("store.zarr"), ["t2m", "land"], split_by(None), inputs=0)
    assert_sample(dataset, 3, {"x": STILL[None], "y": STATE[1, 3, :1]})


@pytest.mark.spmd(2)
def test_what_is_constant_along_a_dim():
    dataset = SeriesDataset(written("well.hdf5"), ["wind", "density"], split_by(None))
    wind = np.broadcast_to(STATE[0, 1, 0, :, :1], (H, W))
    assert_sample(dataset, 1, {"x": np.stack([wind, STATE[0, 1, 0]])})


@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", ["new.nc", "store.zarr"])
def test_selected_levels(name):
    dataset = SeriesDataset(written(name), ["z"], split_by(None), select={"level": [850]})
    assert_sample(dataset, 2, {"x": STATE[0, 2, 1:], "y": STATE[0, 3, 1:]})


class Learn(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = torch.nn.Conv2d(3, 3, 3, padding=1), []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch["x"]) - batch["y"]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.spmd(2)
def test_training_on_parts_is_training_on_whole_states():
    path = written("well.hdf5")
    torch.manual_seed(0)
    module, alone = Learn(), Learn()
    alone.load_state_dict(module.state_dict())
    data = SeriesDataModule(str(path), variables=["density", "velocity"])
    data.train_dataloader = lambda: DataLoader(data.datasets["train"], 4)
    training.trainer((2,)).fit(module, datamodule=data)
    optimizer = alone.configure_optimizers()
    for batch in DataLoader(SeriesDataset(path, ["density", "velocity"]), 4):
        optimizer.zero_grad()
        alone.training_step(batch, 0).backward()
        optimizer.step()
    assert len(module.losses) == N * (T - 1) / 4
    assert module.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.spmd(2)
def test_workers_open_the_files_for_themselves():
    multiprocessing.current_process()._config["daemon"] = False  # which may have no workers
    try:
        data = SeriesDataModule(str(written("new.nc")), variables=["z", "t2m"], num_workers=2)
        data.train_dataloader = lambda: DataLoader(data.datasets["train"], 2, num_workers=2)
        module = Learn()
        training.trainer((2,)).fit(module, datamodule=data)
    finally:
        multiprocessing.current_process()._config["daemon"] = True
    assert len(module.losses) == 2


def test_several_files(tmp_path):
    for n in range(2):
        the_well(tmp_path / f"part_{n}.hdf5", STATE[:, 2 * n :])
    whole = SeriesDataset(tmp_path, ["density"])
    assert len(whole) == N * (4 + 2)
    assert whole[2 * 4]["x"].equal(torch.from_numpy(STATE[0, 2, :1]))
    assert whole[11]["y"].equal(torch.from_numpy(STATE[1, 4, :1]))
    assert SeriesDataset([tmp_path / "part_1.hdf5"], ["density"])[0]["x"].equal(whole[8]["x"])
    with pytest.raises(IndexError, match="there are 12 samples; got 12"):
        whole[12]
    the_well(tmp_path / "part_2.hdf5", STATE[..., :4])
    with pytest.raises(ValueError, match=r"part_2.hdf5 holds .*density \(1 channels\) on .* 7 x 4"):
        SeriesDataset(tmp_path, ["density"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty has no file that ends in \.h5"):
        SeriesDataset(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "well.hdf5",
            {"variables": ["heat"]},
            r"no variable 'heat'; it has \['density', 'depth'",
        ),
        ("well.hdf5", {"select": {"level": [1]}}, r"well.hdf5 is HDF5, which is read without them"),
        ("well.hdf5", {"outputs": 5}, "a sample spans 6 steps, but the longest trajectory has 5"),
        ("well.hdf5", {"inputs": 0}, "'x' would have no channels"),
        ("well.hdf5", {"variables": ["depth"]}, "'y' would have no channels"),
        ("well.hdf5", {"every": 0}, "every must be 1 or more; got 0"),
        ("store.zarr", {"time": "when"}, "no variable that varies along 'when'"),
        ("store.zarr", {"select": {"level": [1]}}, "store.zarr cannot be read: .*level"),
        ("store.zarr", {"select": {"height": [1]}}, "store.zarr cannot be read: .*height"),
        ("store.zarr", {"spatial_dims": 4}, "no variable that varies along 'time'"),
    ],
)
def test_mistakes(name, options, words, tmp_path):
    WRITE[name](tmp_path / name)
    with pytest.raises(ValueError, match=words):
        SeriesDataset(tmp_path / name, **options)


@pytest.mark.parametrize("name", ["a.h5", "a.nc", "a.zarr"])
def test_files_that_cannot_be_read(name, tmp_path):
    path = tmp_path / name
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist"):
        SeriesDataset(path)
    path.mkdir() if name == "a.zarr" else path.write_bytes(b"\x89HDF\r\n\x1a\nnothing more")
    with pytest.raises(ValueError, match=f"{name} cannot be read"):
        SeriesDataset(path)
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"must end in \.h5, \.hdf5, \.zarr, \.nc"):
        SeriesDataset(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.isel(latitude=slice(0, None, 2)), None),
        (lambda w: w[["t2m", "z"]], r"has the channels \[\('t2m', 1\), \('z', 2\)\], but training"),
        (lambda w: w.isel(level=[1, 0]), r"along 'level' than training \(850 to 500, not 500 to"),
        (lambda w: w.assign_coords(level=[300, 500]), r"along 'level' than training"),
        (lambda w: w.isel(latitude=slice(None, None, -1)), "along 'latitude' than training"),
    ],
)
def test_other_channels_than_those_of_training(change, words, tmp_path):
    file = weather().assign_coords(latitude=np.arange(float(H)))
    file.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    change(file).to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    data = SeriesDataModule(str(tmp_path / "a.nc"), test=str(tmp_path / "b.nc"))
    data.trainer = None
    with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
        data.setup("test")


def test_a_trajectory_of_another_grid(tmp_path):
    pdebench_seeds(tmp_path / "seeds.h5")
    with h5py.File(tmp_path / "seeds.h5", "a") as file:
        del file["0001/data"]
        file["0001/data"] = np.zeros((T, 2 * H, 2 * W, 2), "f4")
    dataset = SeriesDataset(tmp_path / "seeds.h5")
    assert dataset[T - 2]["x"].shape == (2, H, W)
    with pytest.raises(ValueError, match=r"trajectory 1 .* has the shape \(5, 14, 12, 2\), and"):
        dataset[T - 1]


def test_damage_is_noticed(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("density", data=STATE[:, :, 0], chunks=(1, 1, H, W), fletcher32=True)
    data = bytearray((tmp_path / "a.h5").read_bytes())
    data[data.index(STATE[1, 3, 0].tobytes())] ^= 1
    (tmp_path / "a.h5").write_bytes(data)
    dataset = SeriesDataset(tmp_path / "a.h5")
    assert dataset[0]["x"].equal(torch.from_numpy(STATE[0, 0, :1]))
    with pytest.raises(ValueError, match=r"step 3 of trajectory 1 of density in .* cannot be read"):
        dataset[7]


def test_grids_that_do_not_fit(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["density"], file["pressure"] = STATE[:, :, 0], STATE[:, :, 0, :4]
    with pytest.raises(ValueError, match="different extents of spatial dim 0: 4, 7"):
        SeriesDataset(tmp_path / "a.h5")
    turned = weather().rename(latitude="longitude", longitude="latitude")[["t2m"]]
    square = weather().isel(latitude=slice(0, W))[["z"]]
    both = xarray.merge([square, turned.isel(longitude=slice(0, W))])
    both.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(ValueError, match=r"different spatial dims: .*latitude"):
        SeriesDataset(tmp_path / "a.nc")


@pytest.mark.parametrize("name", ["a.h5", "a.nc", "well.hdf5"])
def test_no_file_names_another_to_be_read(name, tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["density"] = STATE[:, :, 0]
    (WRITE["well.hdf5"] if name == "well.hdf5" else pdebench)(tmp_path / name)
    inner = "t0_fields/density" if name == "well.hdf5" else "density"
    with h5py.File(tmp_path / name, "a") as file:
        del file[inner]
        file[inner] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "density")
    with pytest.raises(ValueError, match="keeps 'density' outside of it"):
        SeriesDataset(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda w: w.isel(level=[1, 0]),
            r"b.nc has other coordinates along 'level' \(850 to 500\)",
        ),
        (lambda w: w.isel(latitude=slice(None, None, -1)), r"along 'latitude' \(5.0 to 0.0\)"),
        (lambda w: w.rename(latitude="longitude", longitude="latitude"), "dims in another order"),
    ],
    ids=["levels", "latitudes", "turned"],
)
def test_coordinates_of_several_files(change, words, tmp_path):
    square = weather().isel(latitude=slice(0, W))
    square = square.assign_coords(latitude=np.arange(float(W)), longitude=np.arange(float(W)))
    square.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    almost = square.assign_coords(latitude=square.latitude.astype("f4") * np.float32(1 + 1e-7))
    almost.to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    assert len(SeriesDataset(tmp_path, ["z"])) == 2 * (T - 1)
    change(square).to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    with pytest.raises(ValueError, match=words):
        SeriesDataset(tmp_path, ["z"])
    if "level" in words:  # the way out that the message names
        chosen = SeriesDataset(tmp_path, ["z"], select={"level": [850, 500]})
        assert chosen[0]["x"].equal(chosen[T - 1]["x"])


@pytest.mark.parametrize("name", ["well.hdf5", "pdebench.h5", "seeds.h5"])
def test_coordinates_of_several_simulations(name, tmp_path):
    group = {"well.hdf5": "dimensions/x", "pdebench.h5": "x-coordinate", "seeds.h5": "0000/grid/x"}
    for copy in ("a", "b"):
        WRITE[name](tmp_path / f"{copy}{name}")
    with h5py.File(tmp_path / f"a{name}", "a") as file:
        if name == "well.hdf5":
            file[group[name]] = np.arange(H)
    with h5py.File(tmp_path / f"b{name}", "a") as file:
        file.pop(group[name], None)
        file[group[name]] = np.arange(H)
    assert len(SeriesDataset(tmp_path)) == 2 * N * (T - 1)
    with h5py.File(tmp_path / f"b{name}", "a") as file:
        file[group[name]][...] = np.arange(H)[::-1]
    with pytest.raises(ValueError, match=r"other coordinates along 'x.*a dataset of each"):
        SeriesDataset(tmp_path)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ([0, 1, 3, 2, 4], "not in the order of their times"),
        ([0, 1, 1, 2, 3], "not in the order of their times"),
        ([4, 3, 2, 1, 0], "not in the order of their times"),
        ([0, 1, 2, 30, 31], r"1 of the 4 steps of .* the first from 2 on"),
        ([31, 59, 90, 120, 151], None),  # months
    ],
)
def test_steps_that_are_not_one_after_the_other(times, words, tmp_path):
    file = weather().assign_coords(time=times)
    file.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    if words and words.startswith("not"):
        with pytest.raises(ValueError, match=words):
            SeriesDataset(tmp_path / "a.nc")
        file.drop_duplicates("time").sortby("time").to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
        assert len(SeriesDataset(tmp_path / "b.nc")) == len(set(times)) - 1
    else:
        with pytest.warns(match=words) if words else contextlib.nullcontext():
            assert len(SeriesDataset(tmp_path / "a.nc")) == 4


@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_calendars_that_numpy_does_not_know(calendar, tmp_path):
    file = weather()
    file["time"].attrs.update(units="days since 1850-01-01", calendar=calendar)
    file.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    found = SeriesDataset(tmp_path / "a.nc", ["t2m"], select={"level": [500]})
    assert found[3]["x"].equal(torch.from_numpy(STATE[1, 3, :1]))
    if importlib.util.find_spec("cftime") is None:
        with pytest.raises(ValueError, match=r"calendar \(.*\) numpy knows nothing"):
            SeriesDataset(tmp_path / "a.nc", select={"time": slice("1850", "1851")})


def test_dims_of_space_that_are_not_the_last(tmp_path):
    weather().transpose(..., "level").to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with pytest.raises(ValueError, match="the last 2 are those of space, so latitude would be"):
        SeriesDataset(tmp_path / "a.nc", ["z"])
    assert SeriesDataset(tmp_path / "a.nc", ["z"], spatial_dims=3)[0]["x"].shape == (1, H, W, 2)
    assert SeriesDataset(tmp_path / "a.nc", ["t2m"])[0]["x"].shape == (1, H, W)


def test_coordinates_are_inputs_if_they_are_named(tmp_path):
    dims = ("latitude", "longitude")
    extra = {"height": (dims, STILL), "name": (("time", *dims), np.full((T, H, W), "rain"))}
    file = weather().assign(extra).set_coords("height")
    file.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    named = SeriesDataset(tmp_path / "a.nc", ["t2m", "height"])
    assert named[0]["x"][1].equal(torch.from_numpy(STILL))
    assert SeriesDataset(tmp_path / "a.nc")[0]["x"].shape == (3, H, W)  # z and t2m
    with pytest.raises(ValueError, match="no variable 'name'"):
        SeriesDataset(tmp_path / "a.nc", ["name"])


def test_a_selection_that_keeps_nothing(tmp_path):
    file = weather().assign_coords(latitude=np.linspace(90, -90, H))
    file.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with pytest.raises(
        ValueError, match=r"keeps nothing .* 'latitude', which goes from 90.0 to -90"
    ):
        SeriesDataset(tmp_path / "a.nc", select={"latitude": slice(0, 90)})
    north = SeriesDataset(tmp_path / "a.nc", ["t2m"], select={"latitude": slice(90, 0)})
    assert north[0]["x"].shape == (1, 4, W)
