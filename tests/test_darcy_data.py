from pathlib import Path

import h5py
import pytest
import torch

from lightning_modules import DarcyDataModule
from lightning_modules.darcy_files import DarcyRecipe

SIZES = {"train_resolution": 8, "num_train": 6, "num_val": 2, "num_test": 3, "batch_size": 2}


def ready(**options) -> DarcyDataModule:
    data = DarcyDataModule(**{**SIZES, **options})
    data.prepare_data()
    data.setup("fit")
    return data


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
    torch.testing.assert_close(data._train.y[:, 0], y["train"])
    torch.testing.assert_close(data._val[0].x, y["test"][:2])


def test_says_which_file_is_missing(tmp_path):
    wanted = rf"resolution 8 need the file {tmp_path}/darcy_train_8.pt or .*Put it there"
    with pytest.raises(FileNotFoundError, match=wanted):
        ready(source=str(tmp_path))


def test_says_when_a_file_has_too_few_samples(tmp_path):
    write_pt(tmp_path / "darcy_train_8.pt", 3, 8)
    with pytest.raises(ValueError, match=r"needs 6 samples of 8 x 8 nodes; .*x \(3, 1, 8, 8\)"):
        ready(source=str(tmp_path))


def test_says_which_hdf5_datasets_are_missing(tmp_path):
    with h5py.File(tmp_path / "darcy.h5", "w") as file:
        file["a"] = [1.0]
    with pytest.raises(ValueError, match=r"datasets x and y.*group train_8; got \['a'\]"):
        ready(source=str(tmp_path / "darcy.h5"))


def test_warns_of_odd_sizes():
    with pytest.warns(UserWarning, match=r"Even resolutions .* got \[9\]"):
        DarcyDataModule(train_resolution=9, test_resolutions=[8])
