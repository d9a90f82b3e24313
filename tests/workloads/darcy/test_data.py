import contextlib
import resource
from pathlib import Path
from types import SimpleNamespace

import h5py
import pytest
import torch

from lightning_modules import DarcyDataModule, TFNODarcy
from lightning_modules.darcy.files import DarcyRecipe, ensure_cached
from lightning_shard import write_fields
from tests import training

SIZES = {"train_resolution": 8, "num_train": 6, "num_val": 2, "num_test": 3, "batch_size": 2}


def ready(**options) -> DarcyDataModule:
    data = DarcyDataModule(**{**SIZES, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def whole(dataset) -> dict[str, torch.Tensor]:
    return torch.utils.data.default_collate([dataset[i] for i in range(len(dataset))])


def test_batches_and_splits(tmp_path):
    data = ready(root=str(tmp_path))
    batch = next(iter(data.train_dataloader()))
    assert {k: (tuple(v.shape), v.dtype) for k, v in batch.items()} == {
        "x": ((2, 1, 8, 8), torch.float32),
        "y": ((2, 1, 8, 8), torch.float32),
    }
    assert len(data.train_dataloader().dataset) == 6
    val, test = data.val_dataloader(), data.test_dataloader()
    assert [len(loader.dataset) for loader in val + test] == [2, 2, 3, 3]
    assert [loader.dataset[0]["x"].shape[-1] for loader in val + test] == [8, 16, 8, 16]
    held_out = torch.cat([val[0].dataset.x, test[0].dataset.x, data.train_dataloader().dataset.x])
    assert len(held_out.unique(dim=0)) == 11


def test_stats_describe_the_training_set(tmp_path):
    data = ready(root=str(tmp_path))
    pairs = data.train_dataloader().dataset
    assert data.stats is not None
    assert data.stats.x_mean == pytest.approx(pairs.x.mean().item())
    assert data.stats.y_std == pytest.approx(pairs.y.std().item())
    torch.testing.assert_close(data.stats.mean_solution, pairs.y.mean(0))


def test_second_run_reads_the_cache(tmp_path, monkeypatch):
    first = ready(root=str(tmp_path))
    monkeypatch.setattr(DarcyRecipe, "generate", lambda self: pytest.fail("generated again"))
    again = ready(root=str(tmp_path))
    torch.testing.assert_close(again._train.y, first._train.y, rtol=0, atol=0)
    assert len(list(tmp_path.iterdir())) == 3  # train, and test at two resolutions


def test_samples_depend_on_the_seed_only(tmp_path):
    first = ready(root=str(tmp_path / "a"))
    again = ready(root=str(tmp_path / "b"))
    other = ready(root=str(tmp_path / "a"), seed=1)
    torch.testing.assert_close(again._train.y, first._train.y, rtol=0, atol=0)
    assert not torch.equal(other._train.x, first._train.x)


@pytest.mark.parametrize("damage", ["cut", "flip", "text"])
def test_damaged_cache_is_rebuilt(tmp_path, damage):
    first = ready(root=str(tmp_path))
    path = next(tmp_path.glob("darcy_train_8_*.pt"))
    content = bytearray(path.read_bytes())
    content[content.index(first._train.y.numpy().tobytes()) + 100] ^= 255
    contents = {"cut": content[: len(content) // 2], "flip": content, "text": b"nothing"}
    expected = first._train.y.clone()
    path.unlink()  # the first one still maps it
    path.write_bytes(contents[damage])
    with pytest.warns(UserWarning, match=r"darcy_train_8_.* is damaged; generating it again"):
        again = ready(root=str(tmp_path))
    torch.testing.assert_close(again._train.y, expected, rtol=0, atol=0)


def test_interrupted_generation_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ready(root=str(tmp_path))
    assert not list(tmp_path.iterdir())


def write_pt(path: Path, count: int, resolution: int) -> dict[str, torch.Tensor]:
    samples = {
        "x": torch.rand(count, resolution, resolution) > 0.5,  # boolean, as neuraloperator's are
        "y": torch.rand(count, resolution, resolution),
    }
    torch.save(samples, path)
    return samples


def test_reads_neuraloperator_files(tmp_path):
    train = write_pt(tmp_path / "darcy_train_8.pt", 7, 8)
    test = write_pt(tmp_path / "darcy_test_8.pt", 5, 8)
    data = ready(source=str(tmp_path), test_resolutions=[8])
    torch.testing.assert_close(data._train.x[:, 0], train["x"][:6].float())
    torch.testing.assert_close(data._val[0].y[:, 0], test["y"][:2])
    torch.testing.assert_close(data._test[0].y[:, 0], test["y"][2:])


@pytest.mark.parametrize("grouped", [True, False])
def test_reads_hdf5(tmp_path, grouped):
    y = {"train": torch.rand(6, 8, 8), "test": torch.rand(5, 1, 8, 8)}
    for part, values in y.items():
        path = tmp_path / ("darcy.h5" if grouped else f"darcy_{part}_8.h5")
        with h5py.File(path, "a") as file:
            group = file.create_group(f"{part}_8") if grouped else file
            group["x"], group["y"] = values.numpy(), values.numpy()
    source = tmp_path / "darcy.h5" if grouped else tmp_path
    data = ready(source=str(source), test_resolutions=[8])
    assert whole(data._train)["y"].equal(y["train"][:, None])
    assert whole(data._val[0])["x"].equal(y["test"][:2])


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_one_file_needs_groups_for_training_and_test(suffix, tmp_path):
    source, y = tmp_path / f"all{suffix}", torch.rand(9, 1, 8, 8)
    write_fields(source, 9, [{"x": y.numpy(), "y": y.numpy()}])
    with pytest.raises(ValueError, match="samples for test would be those of training; put"):
        ready(source=str(source), test_resolutions=[8])


def test_a_resolution_that_is_there_twice():
    with pytest.raises(ValueError, match=r"test_resolutions must be there once; got \[8, 8\]"):
        DarcyDataModule(test_resolutions=[8, 8], num_test=[1, 2])


@pytest.mark.parametrize("suffix", [".pt", ".h5", ".zarr"])
def test_two_processes_may_generate_at_once(suffix, tmp_path, monkeypatch):
    recipe, generate = DarcyRecipe("train", 8, 3), DarcyRecipe.generate

    def after_another(self):
        monkeypatch.setattr(DarcyRecipe, "generate", generate)
        ensure_cached(recipe, tmp_path, suffix)
        return generate(self)

    monkeypatch.setattr(DarcyRecipe, "generate", after_another)
    ensure_cached(recipe, tmp_path, suffix)
    assert [*tmp_path.iterdir()] == [recipe.path(tmp_path, suffix)]
    monkeypatch.setattr(DarcyRecipe, "generate", lambda self: pytest.fail("generated again"))
    ensure_cached(recipe, tmp_path, suffix)


def test_says_which_file_is_missing(tmp_path):
    wanted = rf"resolution 8 need the file {tmp_path}/darcy_train_8.pt, .* has none. Put it there"
    with pytest.raises(FileNotFoundError, match=wanted):
        ready(source=str(tmp_path))


def test_says_which_resolutions_there_are(tmp_path):
    write_pt(tmp_path / "darcy_train_8.pt", 6, 8)
    write_pt(tmp_path / "darcy_test_16.pt", 6, 16)
    with pytest.raises(
        FileNotFoundError, match=r"test samples the folder has 16\. .*another resol"
    ):
        ready(source=str(tmp_path), test_resolutions=[8])
    with h5py.File(tmp_path / "darcy.h5", "w") as file:
        file["train_8/x"] = file["train_8/y"] = file["test_16/x"] = torch.rand(6, 8, 8).numpy()
    with pytest.raises(FileNotFoundError, match=r"no group test_8, .*; it has test_16, train_8"):
        ready(source=str(tmp_path / "darcy.h5"), test_resolutions=[8])


@pytest.mark.quick_rows("hdf5")
@pytest.mark.parametrize("storage", ["hdf5", "zarr"])
def test_fields_on_disk_are_those_in_memory(tmp_path, storage):
    memory = ready(root=str(tmp_path))
    disk = ready(root=str(tmp_path), storage=storage)
    assert [len(d) for d in (disk._train, *disk._val, *disk._test)] == [6, 2, 2, 3, 3]
    for pairs, fields in zip(
        (memory._train, *memory._val, *memory._test),
        (disk._train, *disk._val, *disk._test),
        strict=True,
    ):
        found = whole(fields)
        assert found["x"].equal(pairs.x)
        assert found["y"].equal(pairs.y)
    assert vars(disk.stats).keys() == vars(memory.stats).keys()
    for name, value in vars(memory.stats).items():
        torch.testing.assert_close(getattr(disk.stats, name), value)


def test_damaged_statistics_are_made_again(tmp_path):
    before = ready(root=str(tmp_path), storage="hdf5").stats
    (kept,) = tmp_path.glob("stats_*.pt")
    kept.write_bytes(kept.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"stats_\w+\.pt is damaged"):
        again = ready(root=str(tmp_path), storage="hdf5").stats
    torch.testing.assert_close(vars(again), vars(before))


@pytest.mark.quick_rows("hdf5")
@pytest.mark.parametrize("storage", ["hdf5", "zarr"])
def test_damaged_cache_of_fields_is_rebuilt(tmp_path, storage):
    expected = whole(ready(root=str(tmp_path), storage=storage)._train)["y"]
    path = next(tmp_path.glob("darcy_train_8_*"))
    path = path if path.is_file() else path / "y" / "c" / "3" / "0" / "0" / "0"
    content = bytearray(path.read_bytes())
    content[content.index(expected[3, 0, 3].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"darcy_train_8_.* is damaged; generating it again"):
        again = ready(root=str(tmp_path), storage=storage)
    assert whole(again._train)["y"].equal(expected)


def test_says_which_storage_there_is():
    with pytest.raises(ValueError, match="must be one of memory, hdf5, zarr; got 'csv'"):
        DarcyDataModule(storage="csv")


@contextlib.contextmanager
def no_room_for_files_above(size):
    """As on a full disk, the system refuses to write more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("storage", ["memory", "hdf5", "zarr"])
def test_disk_that_fills_while_samples_are_written(tmp_path, storage):
    sizes = {"train_resolution": 32, "num_train": 40, "storage": storage}
    wanted = rf"40 samples .* 32 x 32 nodes, 0.3 MiB, cannot be written to {tmp_path} .*`root`\.$"
    with no_room_for_files_above(3000), pytest.raises(OSError, match=wanted):
        ready(root=str(tmp_path), **sizes)
    assert not list(tmp_path.iterdir())


def test_disk_that_is_full_is_noticed_before_solving(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(DarcyRecipe, "generate", lambda self: pytest.fail("solved in vain"))
    with pytest.raises(OSError, match=r"No space left on device\); free space there, or choose"):
        ready(root=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_says_which_source_is_damaged(tmp_path):
    write_pt(tmp_path / "darcy_train_8.pt", 6, 8)
    (tmp_path / "darcy_train_8.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"darcy_train_8.pt is not a whole file of a dict"):
        ready(source=str(tmp_path))
    torch.save({"x": torch.zeros(6, 8, 8)}, tmp_path / "darcy_train_8.pt")
    with pytest.raises(ValueError, match=r"a dict of tensors x and y"):
        ready(source=str(tmp_path))


def test_says_when_a_file_has_too_few_samples(tmp_path):
    write_pt(tmp_path / "darcy_train_8.pt", 3, 8)
    with pytest.raises(ValueError, match=r"needs 6 samples of 8 x 8 nodes; .*x \(3, 1, 8, 8\)"):
        ready(source=str(tmp_path))


def test_says_which_hdf5_datasets_are_missing(tmp_path):
    with h5py.File(tmp_path / "darcy.h5", "w") as file:
        file["a"] = [1.0]
    with pytest.raises(ValueError, match=r"datasets x and y.*group train_8, .* got \['a'\]"):
        ready(source=str(tmp_path / "darcy.h5"))


def test_warns_of_odd_sizes():
    with pytest.warns(UserWarning, match=r"Even resolutions .* got \[9\]"):
        DarcyDataModule(train_resolution=9, test_resolutions=[8])


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_darcy_from_disk_trains_and_tests_as_from_memory():
    folder, metrics = training.shared_path("darcy"), {}
    sizes = {"train_resolution": 16, "num_train": 4, "num_val": 2, "num_test": 2, "batch_size": 2}
    for storage in ("memory", "zarr", "hdf5"):
        torch.manual_seed(0)
        data = DarcyDataModule(root=str(folder), storage=storage, **sizes)
        module = TFNODarcy(n_modes=(4, 4), hidden_channels=4, n_layers=2)
        runner = training.trainer((2,), max_epochs=1)
        runner.fit(module, datamodule=data)
        (first, second) = runner.test(module, datamodule=data, verbose=False)
        metrics[storage] = first | second
    assert {"test/l2_16", "test/h1_32_baseline"} <= metrics["memory"].keys()
    for storage in ("zarr", "hdf5"):
        assert metrics[storage] == pytest.approx(metrics["memory"], rel=1e-5)


def test_sizes_for_each_test_resolution(tmp_path):
    sizes = SIZES | {"num_test": [3, 1], "eval_batch_size": [2, 1], "test_resolutions": [8, 16]}
    data = DarcyDataModule(**sizes, root=str(tmp_path))
    data.prepare_data()
    data.setup("test")
    loaders = data.test_dataloader()
    assert [len(loader.dataset) for loader in loaders] == [3, 1]
    assert [loader.batch_size for loader in loaders] == [2, 1]
    assert [len(loader.dataset) for loader in data.val_dataloader()] == [2, 2]
    assert data.train_dataloader().batch_size == SIZES["batch_size"]
    with pytest.raises(ValueError, match=r"num_test must be one number, or one for each of the"):
        DarcyDataModule(**(sizes | {"num_test": [3]}))


def test_without_held_out_samples_all_test_samples_validate(tmp_path):
    """As neuraloperator's Trainer does, on test sets of their own sizes."""
    data = ready(root=str(tmp_path), num_val=0, num_test=[5, 3], eval_batch_size=[4, 2])
    for loaders in (data.val_dataloader(), data.test_dataloader()):
        assert [len(loader.dataset) for loader in loaders] == [5, 3]
        assert [loader.batch_size for loader in loaders] == [4, 2]
    assert torch.equal(data.val_dataloader()[1].dataset.y, data.test_dataloader()[1].dataset.y)


def test_files_of_an_older_torch_are_read(tmp_path):
    """Before 1.6 torch.save wrote no archives, which alone can be mapped into memory."""
    for part, count in (("train", 6), ("test", 5)):
        samples = write_pt(tmp_path / "new.pt", count, 8)
        path = tmp_path / f"darcy_{part}_8.pt"
        torch.save(samples, path, _use_new_zipfile_serialization=False)
    data = ready(source=str(tmp_path), test_resolutions=[8])
    assert len(data._train) == 6
    assert torch.equal(data._test[0].y[:, 0], samples["y"][2:5])


class Zenodo:
    """Stands for the record of neuraloperator's files: archives of a train and a test file."""

    def __init__(self, folder: Path, files: int = 2) -> None:
        self.folder, self.files = folder, files
        self.asked: list[str] = []

    def __call__(self, record: str, root: Path, archives: list[str]) -> None:
        assert record == "12784353"
        self.asked += archives
        for archive in archives:
            resolution = int(archive.removeprefix("darcy_").removesuffix(".tgz"))
            inside = root / "data"  # the archive's own folder
            inside.mkdir(exist_ok=True)
            for part in ("train", "test")[: self.files]:
                write_pt(inside / f"darcy_{part}_{resolution}.pt", 8, resolution)


FETCH = "neuralop.data.datasets.web_utils.download_from_zenodo_record"


def test_neuraloperators_files_are_fetched_once(tmp_path, monkeypatch):
    zenodo = Zenodo(tmp_path)
    monkeypatch.setattr(FETCH, zenodo)
    sizes = {"train_resolution": 16, "test_resolutions": [16, 32], "num_val": 0, "download": True}
    for _ in range(2):
        data = ready(source=str(tmp_path / "new" / "folder"), **sizes)
    assert zenodo.asked == ["darcy_16.tgz", "darcy_32.tgz"]
    assert [loader.dataset.x.shape[-1] for loader in data.val_dataloader()] == [16, 32]
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {
        f"darcy_{part}_{resolution}.pt" for part in ("train", "test") for resolution in (16, 32)
    }


def test_what_cannot_be_fetched_is_a_sentence(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("no network")

    sizes = {"train_resolution": 16, "test_resolutions": [16], "download": True}
    source = tmp_path / "neuraloperator"
    monkeypatch.setattr(FETCH, fail)
    with pytest.raises(ConnectionError, match=r"darcy_16.tgz of https://zenodo\S+ could not"):
        ready(source=str(source), **sizes)
    assert not list(source.iterdir())
    monkeypatch.setattr(FETCH, Zenodo(tmp_path, files=1))
    with pytest.raises(ConnectionError, match=r"held no darcy_test_16.pt: put the file into"):
        ready(source=str(source), **sizes)
    with pytest.raises(ValueError, match="have 16, 32, 64, 128, 421 nodes a side; got 20"):
        ready(source=str(source), **sizes | {"train_resolution": 20})
    with pytest.raises(ValueError, match="name it by `source`, such as data/neuraloperator"):
        DarcyDataModule(download=True)
