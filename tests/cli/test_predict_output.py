"""`predict` keeps what it computes: where --output says, or beside the logs."""

import sys
from typing import ClassVar

import h5py
import numpy as np
import pytest
import torch
import zarr
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_shard import FieldDataset, write_fields
from lightning_shard.cli import main as cli
from tests.cli.test_tiles import CONFIG, HERE, Net
from tests.pairs import choose
from tests.parity import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")


def predict(folder, *words, keeps=f"  callbacks: {{class_path: {HERE}.Keep}}\n"):
    (folder / "given.yaml").write_text(CONFIG.replace(keeps, ""))
    where = ["--config", str(folder / "given.yaml"), "--trainer.default_root_dir", str(folder)]
    cli.main(["predict", *where, *words])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_beside_the_logs_by_default(here, caplog):
    predict(here)
    files = sorted((here / "predictions").iterdir())
    assert [file.name for file in files] == ["000000.pt", "000001.pt"]
    found = [torch.load(file, weights_only=True) for file in files]
    assert [each["name"] for each in found] == ["0", "1"]
    assert found[0]["field"].shape == (4, 19, 12)
    assert f"Predictions: {here / 'predictions'}" in caplog.text


@pytest.mark.quick_rows("tiles")
@pytest.mark.parametrize("tiles", [(), ("--tiles", "3")], ids=["whole", "tiles"])
def test_into_a_file(tiles, here, monkeypatch):
    predict(here)
    monkeypatch.setattr(
        Net, "predict_step", lambda self, batch, _: self.layers(batch["field"]).tanh()
    )
    predict(here, "--output", "out.zarr", *tiles)
    written = zarr.open("out.zarr", mode="r")["prediction"][:]
    for number, values in enumerate(written):
        one = torch.load(here / "predictions" / f"{number:06d}.pt", weights_only=True)
        assert_same(torch.from_numpy(values), one["field"])


def test_what_was_asked_for_is_not_left_out(here, capsys):
    with pytest.raises(SystemExit):
        predict(here, "--output", "out.zarr")
    assert "predict_step returned 'name' of type str" in capsys.readouterr().err


@pytest.mark.parametrize("tiles", [(), ("--tiles", "3")], ids=["whole", "tiles"])
def test_no_batch_is_told(tiles, here):
    with pytest.warns(UserWarning, match="There was no batch to predict, so no predictions are"):
        predict(here, "--trainer.limit_predict_batches", "0", "--output", "out.zarr", *tiles)
    assert not (here / "out.zarr").exists()


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("out.npz", "the format of out.npz is not known; end its name in .zarr"),
        ("given.yaml", "the format of given.yaml is not known"),
        ("there.h5", "there.h5 is there already; choose another path, or remove it"),
        ("given.yaml/new/out.zarr", "out.zarr cannot be written, because given.yaml is a file"),
        ("new.tif", r"pip install 'lightning-shard[tiff]' installs it"),
    ],
)
def test_mistakes_are_told_before_anything_is_built(output, sentence, here, capsys, monkeypatch):
    (here / "there.h5").touch()
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(SystemExit) as ended:
        predict(here, "--output", output)
    said = capsys.readouterr().err
    assert (ended.value.code, sentence in said) == (2, True), said


def test_other_commands_have_no_output(here, capsys):
    (here / "given.yaml").write_text(CONFIG)
    with pytest.raises(SystemExit):
        cli.main(["test", "--config", "given.yaml", "--output", "x.zarr"])
    assert "unknown option 'output'" in capsys.readouterr().err


class FilesOfFields(LightningDataModule):
    """Its fields lie in a file; it keeps the extents of what was read."""

    read: ClassVar[list[int]] = []

    def setup(self, stage):
        dataset = FieldDataset("in.zarr", ["field"], self.trainer)
        plain = dataset.file.read

        def read(name, sample, index):
            self.read.append(index[1].stop - index[1].start)
            return plain(name, sample, index)

        dataset.file.read = read
        self.dataset = dataset

    def predict_dataloader(self):
        return DataLoader(self.dataset)


class OfFiles(Net):
    def predict_step(self, batch, batch_idx):
        return self.layers(batch["field"]).tanh()


@pytest.mark.parametrize(
    ("output", "precision"), choose(["out.zarr", "out.h5", "out"], ["32-true", "64-true"])
)
def test_no_field_is_in_memory_as_a_whole(output, precision, here):
    fields = np.random.default_rng(0).standard_normal((3, 2, 19, 12)).astype("float32")
    write_fields("in.zarr", 3, [{"field": fields}])
    model = "OfFiles" if precision == "64-true" else "OfFilesSingle"
    (here / "given.yaml").write_text(
        f"trainer: {{accelerator: cpu, logger: false, enable_progress_bar: false, "
        f"precision: {precision}}}\n"
        f"model: {__name__}.{model}\ndata: {__name__}.FilesOfFields\n"
    )
    FilesOfFields.read = []
    cli.main(["predict", "--config", "given.yaml", "--tiles", "4", "--output", output])
    assert sorted({*FilesOfFields.read}) == [4, 5]
    assert len(FilesOfFields.read) == 3 * 4
    module = globals()[model]()
    with torch.no_grad():
        x = torch.from_numpy(fields).to(next(module.parameters()).dtype)
        wanted = module.predict_step({"field": x}, 0)
    if output == "out":
        found = torch.stack([torch.load(f"out/{n:06d}.pt") for n in range(3)])
    else:
        root = zarr.open("out.zarr") if output == "out.zarr" else h5py.File("out.h5")
        found = torch.from_numpy(root["prediction"][:])
    assert_same(found, wanted)


class OfFilesSingle(OfFiles):
    def __init__(self):
        super().__init__()
        self.float()


class GivenByPlace(FilesOfFields):
    def predict_dataloader(self):
        return DataLoader(self.dataset, 1)


def test_a_batch_size_that_lightning_cannot_give_again(here, capsys):
    write_fields("in.zarr", 1, [{"field": np.zeros((1, 2, 19, 12), "float32")}])
    (here / "given.yaml").write_text(
        "trainer: {accelerator: cpu, logger: false}\n"
        f"model: {__name__}.OfFilesSingle\ndata: {__name__}.GivenByPlace\n"
    )
    with pytest.raises(SystemExit):
        cli.main(["predict", "--config", "given.yaml", "--output", "out.zarr"])
    said = capsys.readouterr().err
    assert "`__init__` argument can be passed to its parent's `batch_size" in said
    assert "give the batch size by its name: DataLoader(dataset, batch_size=2)" in said


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
def test_no_last_checkpoint_is_no_new_model(here, capsys):
    with pytest.raises(SystemExit) as ended:
        predict(here, "--ckpt_path", "last", "--output", "out.zarr")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "error: ckpt_path is 'last', but no ModelCheckpoint of this configuration" in said
    assert "give the path of the file, which fit names after 'Resume:'" in said
    assert not (here / "out.zarr").exists()


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`:UserWarning")
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning")
def test_the_last_checkpoint_of_a_named_folder(here):
    keeps = (
        "  callbacks: {class_path: ModelCheckpoint, init_args: {dirpath: kept, save_last: true}}"
    )
    text = CONFIG.replace(f"  callbacks: {{class_path: {HERE}.Keep}}", keeps)
    (here / "given.yaml").write_text(text)
    cli.main(["fit", "--config", "given.yaml", "--trainer.default_root_dir", "."])
    words = "--config given.yaml --ckpt_path last --output out".split()
    cli.main(["predict", *words, "--trainer.default_root_dir", "."])
