"""Every format of predictions holds each sample once, in the order of the dataset, on any mesh."""

import warnings
from contextlib import nullcontext
from unittest import mock

import h5py
import nibabel
import numpy as np
import pytest
import tifffile
import torch
import zarr
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_shard import PredictionWriter, VolumeDataset
from lightning_shard.data.field_sink import Field, FieldSink
from lightning_shard.trainer.callbacks.shared_arrays import SharedArrays
from tests import training
from tests.checkpoint.test_resume_inside_epoch import shared_path
from tests.trainer.featured import Featured, loader
from tests.trainer.test_predictions import Predicts, expected
from tests.training import Fields, generator
from tests.workloads.darcy.test_data import no_room_for_files_above

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


@pytest.mark.quick_rows("zarr", "tif")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_on_two_ranks_of_a_domain(kind):
    predicts(shared_path("domain" if kind == "folder" else f"domain.{kind}"), (2,))


@pytest.mark.quick_rows("h5", "nii.gz", "folder")
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


def of_several_extents(index):
    x = torch.randn(1, 8 + index, 7, generator=generator(index), dtype=torch.float64)
    return {"x": x}


class Named(Alone):
    """Returns predictions by names, or with the dtype of the batch's number."""

    def __init__(self, returned):
        super().__init__()
        self.returned = returned

    def predict_step(self, batch, batch_idx):
        return self.returned(self(batch["x"]), batch_idx)


def predict_into(path, domain, returned, data, **options):
    runner = training.trainer(domain, callbacks=[PredictionWriter(path)], **options)
    runner.predict(Named(returned), data, return_predictions=False)


@pytest.mark.quick_rows("folder-1-1", "folder-2-1", "nii.gz-2-2")
@pytest.mark.parametrize(
    ("ranks", "domain"),
    [pytest.param(n, d, marks=pytest.mark.spmd(n)) for n, d in ((1, 1), (2, 1), (2, 2))],
)
@pytest.mark.parametrize("kind", ["nii.gz", "folder"])
def test_files_of_samples_have_several_extents(ranks, domain, kind):
    path = shared_path("several" if kind == "folder" else f"several.{kind}")
    data = DataLoader(Fields(of_several_extents, 4), 1)

    def returned(field, number):
        return field if kind == "folder" else field[..., None]

    predict_into(path, (domain,), returned, data)
    torch.distributed.barrier()
    for number in range(4):
        with torch.no_grad():
            wanted = Featured()(of_several_extents(number)["x"][None])[0]
        if kind == "folder":
            found = torch.load(path / f"{number:06d}.pt", weights_only=True)
        else:
            image = nibabel.load(path.with_name(f"several_{number:06d}.nii.gz"))
            found = torch.from_numpy(np.array(image.dataobj))[None, ..., 0]
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.spmd(n)) for n in (1, 2)])
def test_a_folder_holds_samples_without_rows(ranks):
    def returned(field, number):
        return {"boxes": torch.ones(1, 0 if number == 1 else 2, 4), "field": field[:, :, :0]}

    path = shared_path("boxes")
    predict_into(path, (ranks,), returned, loader(1, 3))
    torch.distributed.barrier()
    found = [torch.load(path / f"{i:06d}.pt", weights_only=True) for i in range(3)]
    assert [tuple(each["boxes"].shape) for each in found] == [(2, 4), (0, 4), (2, 4)]
    assert {tuple(each["field"].shape) for each in found} == {(1, 0, 7)}


UNLIKE = {
    "shapes": (lambda field, number: field, "another \\(1, \\d+, 7\\)"),
    "dtypes": (lambda field, number: (field * 9).long()[:, :, 0] if number else field[:, :, 0],
               "float64, and another .* int64"),
    "dots": (lambda field, number: {"../x": field}, "'../x', which names nothing"),
    "empty": (lambda field, number: {"": field}, "'', which names nothing"),
    "alike": (lambda field, number: {1: field, "1": field + 1}, "'1' and '1', which one file"),
    "inside": (lambda field, number: {"a/b": field, "a": field}, "'a/b' and 'a', which one file"),
}  # fmt: skip


@pytest.mark.quick_rows(
    "shapes-zarr-1", "shapes-zarr-2", "dtypes-h5-2", "dots-zarr-2", "empty-zarr-1",
    "alike-zarr-1", "inside-zarr-1",
)  # fmt: skip
@pytest.mark.parametrize(
    ("kind", "domain"),
    [
        pytest.param("zarr", 1, marks=pytest.mark.spmd(1)),
        pytest.param("zarr", 2, marks=pytest.mark.spmd(2)),
        pytest.param("h5", 2, marks=pytest.mark.spmd(2)),
    ],
)
@pytest.mark.parametrize("which", UNLIKE)
def test_an_array_refuses_samples_unlike_its_own(which, kind, domain):
    path, (returned, said) = shared_path(f"unlike.{kind}"), UNLIKE[which]
    with pytest.raises(ValueError, match=said):
        predict_into(path, (domain,), returned, DataLoader(Fields(of_several_extents, 3), 1))
    torch.distributed.barrier()
    assert not path.exists()


@pytest.mark.spmd(2)
def test_names_that_a_file_system_would_change():
    def returned(field, number):
        return {"50%": field, "a b/ü": field + 1, "spectrum": torch.fft.rfft2(field)}

    path = shared_path("names")
    predict_into(path, (2,), returned, loader(2, 3))
    torch.distributed.barrier()
    found = torch.load(path / "000002.pt", weights_only=True)
    wanted = expected(3)[2]
    assert {*found} == {"50%", "a b/ü", "spectrum"}
    for name, value in {"50%": wanted, "a b/ü": wanted + 1, "spectrum": wanted}.items():
        value = torch.fft.rfft2(value) if name == "spectrum" else value
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("factor", [1, 1j])
@pytest.mark.parametrize("kind", ["zarr", "h5"])
def test_samples_without_a_prediction_are_nan(kind, factor):
    path = shared_path(f"some_{factor}.{kind}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        predict_into(path, (1,), lambda f, _: f * factor, loader(1, 5), limit_predict_batches=1)
    said = [str(each.message) for each in caught if "samples have" in str(each.message)]
    first = torch.distributed.get_rank() == 0
    assert [line.partition(";")[0] for line in said] == [
        "2 of the 5 samples have a 'prediction'"
    ] * first
    torch.distributed.barrier()
    found = read(path, 5)
    wanted = expected(2).numpy() * factor
    np.testing.assert_allclose(found[:2], wanted, rtol=1e-10, atol=1e-12)
    assert np.isnan(found[2:]).all()


@pytest.mark.parametrize(
    ("kind", "domain"),
    [
        pytest.param("zarr", 1, marks=pytest.mark.spmd(2)),
        pytest.param("h5", 1, marks=pytest.mark.spmd(2)),
        pytest.param("zarr", 2, marks=pytest.mark.spmd(4)),
    ],
)
def test_names_that_the_first_rank_does_not_have(kind, domain):
    """Those that only another replica returns, and those that the first returns later."""

    def returned(field, number):
        replica = torch.distributed.get_rank()  # a step counts replicas
        found = {"extra": field} if replica else {"prediction": field}
        if number or replica:
            found["late"] = field + 1
        return found if number < 2 or replica else None

    path = shared_path(f"unlike.{kind}")
    predict_into(path, (domain,), returned, loader(1, 6))
    torch.distributed.barrier()
    wanted, never = expected(6).numpy(), np.full((1, 9, 7), np.nan)
    opened = zarr.open_group(path, mode="r") if kind == "zarr" else h5py.File(path)
    for name, samples in {"extra": (1, 3, 5), "late": (1, 2, 3, 5), "prediction": (0, 2)}.items():
        right = [wanted[i] + (name == "late") if i in samples else never for i in range(6)]
        np.testing.assert_allclose(opened[name][:], np.stack(right), rtol=1e-10, atol=1e-12)
    assert not [*path.parent.glob("*.part*")]


@pytest.mark.spmd(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_array_that_one_rank_of_a_domain_sees_late(rank):
    """Rank 0 puts together what that rank leaves, whose rows do not tell the whole shape."""
    path = shared_path("late.zarr")
    unseen = mock.patch.object(SharedArrays, "array", return_value=None)
    with unseen if torch.distributed.get_rank() == rank else nullcontext():
        predicts(path, (2,))


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


class Noise(Featured):
    def predict_step(self, batch, batch_idx):
        return torch.rand_like(self(batch["x"]).repeat_interleave(9, 2).repeat_interleave(9, 3))


@pytest.mark.quick_rows("h5-1", "zarr-1", "tif-1", "folder-2")
@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.spmd(n)) for n in (1, 2)], ids=str
)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_disk_that_fills_is_named(kind, ranks):
    path = shared_path("a full disk" if kind == "folder" else f"a full disk.{kind}")
    runner = training.trainer((ranks,), callbacks=[PredictionWriter(path)])
    # the rank that fails first removes what all have written, while another one may be writing
    gone = "|No such file or directory .ENOENT" if ranks > 1 else ""
    words = rf"'{path}' cannot be written: (File too large .EFBIG{gone})"
    with (
        no_room_for_files_above(40_000 if kind == "h5" else 2_000),
        pytest.raises(Exception, match=words),
    ):
        runner.predict(Noise(), loader(2, 8), return_predictions=False)
    assert not path.exists()


def test_a_disk_that_fills_as_a_file_of_torch_is_written(tmp_path):
    """It holds more bytes than the raw values, which were written before."""
    sink = FieldSink(tmp_path / "out")
    sink.add("prediction", Field(1, (100,), np.dtype("f4")))
    sink.write("prediction", 0, (), np.zeros(100, "f4"))
    words = r"/out' cannot be written: File too large \(EFBIG\)"
    with no_room_for_files_above(700), pytest.raises(OSError, match=words):
        sink.close()


@pytest.mark.parametrize("kind", FORMATS)
def test_two_runs_that_write_one_file_do_not_mix(kind, tmp_path):
    path = tmp_path / ("twice" if kind == "folder" else f"twice.{kind}")
    sinks = [FieldSink(path, overwrite=True) for _ in range(2)]
    shape = (3, 1, 9, 7)
    values = [np.full(shape, number, "f4") for number in range(2)]
    for sample in range(3):
        for sink, value in zip(sinks, values, strict=True):
            sink.add("prediction", Field(3, shape[1:], value.dtype))
            sink.write("prediction", sample, (), value[sample])
    for sink, value in zip(sinks, values, strict=True):
        sink.close()
        np.testing.assert_array_equal(read(path, 3).reshape(shape), value)
    assert not [*tmp_path.glob("*.partial")]


def test_files_beside_that_no_run_has_written_are_not_replaced(tmp_path):
    scan, old = tmp_path / "case_T1_000001.tif", tmp_path / "case_000005.tif"
    for path in (scan, old):
        path.touch()
    sink = FieldSink(tmp_path / "case.tif", overwrite=True)
    sink.add("prediction", Field(2, (1, 9, 7), np.dtype("f4")))
    for sample in range(2):
        sink.write("prediction", sample, (), np.ones((1, 9, 7), "f4"))
    sink.close()
    assert {*tmp_path.iterdir()} == {scan, *(tmp_path / f"case_00000{n}.tif" for n in range(2))}


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileExistsError, match=r"'notes.txt', which is no prediction and would be"):
        PredictionWriter(tmp_path, overwrite=True)
    assert PredictionWriter(tmp_path / "predictions", overwrite=True).path


def test_the_end_of_a_name_is_known():
    with pytest.raises(ValueError, match=r"predictions.npz is not known; end its name in .zarr"):
        PredictionWriter("predictions.npz")


def test_a_missing_package_is_named(monkeypatch):
    for end, extra in {".zarr": "zarr", ".h5": "hdf5", ".tif": "tiff", ".nii.gz": "nifti"}.items():
        package = {"hdf5": "h5py", "tiff": "tifffile", "nifti": "nibabel"}.get(extra, extra)
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=rf"pip install 'lightning-shard\[{extra}\]'"):
            PredictionWriter(f"predictions{end}")


class Images(Predicts):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch["image"]


@pytest.mark.quick_rows("2")
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.spmd(n)) for n in (1, 2)])
def test_voxels_lie_where_those_of_the_dataset_do(ranks):
    folder = shared_path("volumes")
    images = [folder / f"{i}.nii" for i in range(4)]
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
        for i, path in enumerate(images):
            affine = np.diag([2.0, 2, 3 + i, 1])
            nibabel.save(nibabel.Nifti1Image(np.full((4, 3, 2), i, "f4"), affine), path)
    torch.distributed.barrier()
    of_files = VolumeDataset({"image": images})
    part = Subset(of_files, [3, 1])
    both = ConcatDataset([Subset(of_files, [2]), part])
    runner = training.trainer((1,), callbacks=[PredictionWriter(folder / "out.nii")])
    loaders = [DataLoader(part, 1), DataLoader(both, 1)]
    runner.predict(Images(), loaders, return_predictions=False)
    torch.distributed.barrier()
    for number, numbers in enumerate([(3, 1), (2, 3, 1)]):
        for sample, i in enumerate(numbers):
            found = nibabel.load(folder / f"out_{number}_prediction_{sample:06d}.nii")
            assert (found.affine == nibabel.load(images[i]).affine).all()
            assert (found.get_fdata() == i).all()
