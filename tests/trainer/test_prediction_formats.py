"""Every format of predictions holds each sample once, in the order of the dataset, on any mesh."""

import warnings

import h5py
import nibabel
import numpy as np
import pytest
import tifffile
import torch
import zarr

from lightning_shard import PredictionWriter
from tests import training
from tests.checkpoint.test_resume_inside_epoch import shared_path
from tests.trainer.featured import Featured, loader
from tests.trainer.test_predictions import Predicts, expected

FORMATS = ("zarr", "h5", "nii.gz", "tif", "folder")


def read(path, samples):
    """The fields of a file, or of the files of all samples."""
    name, *end = path.name.split(".", 1)
    numbered = [path.with_name(f"{name}_{i:06d}.{''.join(end)}") for i in range(samples)]
    if end == ["zarr"]:
        return zarr.open_group(path, mode="r")["prediction"][:]
    if end == ["h5"]:
        with h5py.File(path) as file:
            return file["prediction"][:]
    if end == ["nii.gz"]:
        volumes = [np.asanyarray(nibabel.load(each).dataobj) for each in numbered]
        return np.stack([x[None] if x.ndim == 3 else np.moveaxis(x, 3, 0) for x in volumes])
    if end == ["tif"]:
        return np.stack([tifffile.imread(each) for each in numbered]).reshape(samples, 1, 9, 7)
    files = sorted(path.iterdir())
    assert [file.name for file in files] == [f"{i:06d}.pt" for i in range(samples)]
    return np.stack([torch.load(file, weights_only=True).numpy() for file in files])


class Alone(Predicts):
    def predict_step(self, batch, batch_idx):
        return self(batch["x"])


def predicts(path, domain):
    writer = PredictionWriter(path)
    runner = training.trainer(domain, callbacks=[writer])
    runner.predict(Alone(), loader(2, 5), return_predictions=False)
    torch.distributed.barrier()
    wanted = expected(5).numpy()
    found = read(path, 5)
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-10, atol=1e-12)
    assert not [*path.parent.glob("*.part*")]


@pytest.mark.spmd(1)
@pytest.mark.parametrize("kind", FORMATS)
def test_on_one_process(kind):
    predicts(shared_path("one" if kind == "folder" else f"one.{kind}"), (1,))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_on_two_ranks_of_a_domain(kind):
    predicts(shared_path("domain" if kind == "folder" else f"domain.{kind}"), (2,))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_on_two_data_replicas_with_an_uneven_batch(kind):
    predicts(shared_path("data" if kind == "folder" else f"data.{kind}"), (1,))


class Fails(Predicts):
    def predict_step(self, batch, batch_idx):
        return self(batch["x"]) if batch_idx == 0 else self(batch["x"]).mean(0)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", FORMATS[:-1])
def test_nothing_is_left_of_a_run_that_fails(kind):
    path = shared_path(f"failed.{kind}")
    runner = training.trainer((2,), callbacks=[PredictionWriter(path)])
    with pytest.raises(ValueError, match=r"of shape \(1, 9, 7\), which is not a tensor with the 2"):
        runner.predict(Fails(), loader(2, 5), return_predictions=False)
    torch.distributed.barrier()
    assert not [*path.parent.glob(f"{path.name}*")]


@pytest.mark.spmd(2)
def test_a_folder_holds_a_split_field_of_no_sample():
    path = shared_path("of no sample")
    runner = training.trainer((2,), callbacks=[PredictionWriter(path)])
    runner.predict(Fails(), loader(2, 4), return_predictions=False)
    torch.distributed.barrier()
    found = torch.load(path / "000003.pt", weights_only=True)
    torch.testing.assert_close(found, expected(4)[2:4].mean(0), rtol=1e-10, atol=1e-12)


class Mixed(Featured):
    def predict_step(self, batch, batch_idx):
        field = self(batch["x"])
        words = [f"{float(x.mean()):.12f}" for x in field.detach()]
        return {"parts": (field, field.mean((1, 2, 3))), "words": words, "batch": 7}


@pytest.mark.spmd(2)
def test_a_folder_holds_texts_and_numbers():
    path = shared_path("mixed")
    runner = training.trainer((1,), callbacks=[PredictionWriter(path)])
    runner.predict(Mixed(), loader(2, 5), return_predictions=False)
    torch.distributed.barrier()
    for number, field in enumerate(expected(5)):
        found = torch.load(path / f"{number:06d}.pt", weights_only=True)
        assert {*found} == {"parts/0", "parts/1", "words", "batch"}
        torch.testing.assert_close(found["parts/0"], field, rtol=1e-10, atol=1e-12)
        assert found["batch"] == 7
        assert float(found["words"]) == pytest.approx(float(field.mean()), abs=1e-11)


class Nothing(Featured):
    def predict_step(self, batch, batch_idx):
        return {"kept": self(batch["x"]), "object": object()} if self.keeps else None


@pytest.mark.spmd(1)
@pytest.mark.parametrize("keeps", [False, True])
def test_the_default_leaves_out_what_no_file_holds(keeps):
    folder = shared_path(f"run {keeps}")
    for _ in range(2):
        module = Nothing()
        module.keeps = keeps
        runner = training.trainer((1,), callbacks=[PredictionWriter()], default_root_dir=folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runner.predict(module, loader(2, 3), return_predictions=False)
        said = [str(each.message) for each in caught if "object" in str(each.message)]
        assert [line.partition(",")[0] for line in said] == [
            "predict_step returned 'object' of type object"
        ] * keeps
    found = [x.name for x in folder.iterdir()] if folder.exists() else []
    assert sorted(found) == ["predictions", "predictions_1"] * keeps


def test_the_end_of_a_name_is_known():
    with pytest.raises(ValueError, match=r"predictions.npz is not known; end its name in .zarr"):
        PredictionWriter("predictions.npz")


def test_a_missing_package_is_named(monkeypatch):
    for end, extra in {".zarr": "zarr", ".h5": "hdf5", ".tif": "tiff", ".nii.gz": "nifti"}.items():
        package = {"hdf5": "h5py", "tiff": "tifffile", "nifti": "nibabel"}.get(extra, extra)
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=rf"pip install 'lightning-shard\[{extra}\]'"):
            PredictionWriter(f"predictions{end}")
