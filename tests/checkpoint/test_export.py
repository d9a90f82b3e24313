"""`export` and `inspect`: a sharded directory as one file, and what is in a checkpoint."""

import shutil
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors.torch import load_file

from lightning_shard import load_weights
from lightning_shard.checkpoint.errors import UnsafeFileError
from lightning_shard.checkpoint.open import hyperparameters
from lightning_shard.cli.main import main
from lightning_shard.trainer.checkpoint_io import CheckpointFiles
from tests import pool
from tests.checkpoint.tiny import SaveAt, Tiny, fit, loader, quiet, tiny


def save_directory(path: str) -> None:
    fit((2,), SaveAt(Path(path), 9), checkpoint_format="sharded")


def save_file(path: str) -> None:
    fit((2,), SaveAt(Path(path), 9))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same state as one file and as a directory, by a run on 2 x 2 processes."""
    folder = tmp_path_factory.mktemp("saved")
    pool.pool_of(4).run(save_directory, {"path": str(folder / "directory.ckpt")})
    pool.pool_of(4).run(save_file, {"path": str(folder / "file.ckpt")})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [pytest.param("directory.ckpt", marks=pytest.mark.slow), "file.ckpt"]
)
def test_names_without_their_beginning(saved, source, tmp_path):
    """The network alone, as its own class names its weights."""
    expected = torch.load(saved / "file.ckpt", weights_only=True)["state_dict"]
    prefix = next(name for name in expected if "." in name).partition(".")[0] + "."
    for name in ("a.pt", "a.safetensors"):
        main(["export", str(saved / source), str(tmp_path / name), "--strip", prefix])
    plain = torch.load(tmp_path / "a.pt", weights_only=True)
    assert {*plain} == {name.removeprefix(prefix) for name in expected} != {*expected}
    assert {*load_file(tmp_path / "a.safetensors")} == {*plain}
    for name, value in expected.items():
        assert torch.equal(plain[name.removeprefix(prefix)], value)


@pytest.mark.slow
def test_beginnings_that_cannot_be_left_out(saved, tmp_path, capsys):
    source, out = str(saved / "file.ckpt"), str(tmp_path / "a.pt")
    weights = {"net.a": torch.ones(1), "a": torch.zeros(1)}
    torch.save({"state_dict": weights}, tmp_path / "two.ckpt")
    for words, said in [
        ([source, out, "--strip", "netwrok."], "no weight's name begins with 'netwrok.'"),
        ([source, str(tmp_path / "a.ckpt"), "--strip", "net."], "a .ckpt keeps their names"),
        ([str(tmp_path / "two.ckpt"), out, "--strip", "net."], "two weights would have one name"),
    ]:
        with pytest.raises(SystemExit):
            main(["export", *words])
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert not Path(out).exists()


@pytest.mark.parametrize("source", ["directory.ckpt", "file.ckpt"])
def test_export(saved, source, tmp_path, capsys):
    """All three kinds of files hold what the file of the run holds."""
    expected = torch.load(saved / "file.ckpt", weights_only=True)
    for name in ("a.ckpt", "a.pt", "a.safetensors"):
        main(["export", str(saved / source), str(tmp_path / name)])
        written = capsys.readouterr()
        assert f"{tmp_path / name}: " in written.out
        assert "reading: 100%" in written.err
    weights = torch.load(tmp_path / "a.pt", weights_only=True)
    whole = torch.load(tmp_path / "a.ckpt", weights_only=True)
    pairs = load_file(tmp_path / "a.safetensors")
    assert pairs["spectrum"].shape == (3, 2, 2)
    for name, value in expected["state_dict"].items():
        assert torch.equal(weights[name], value)
        assert torch.equal(whole["state_dict"][name], value)
        if name != "spectrum":
            assert torch.equal(pairs[name], value)
    module = tiny(seed=1)
    load_weights(module, tmp_path / "a.safetensors")
    assert torch.equal(module.spectrum, expected["state_dict"]["spectrum"])
    ours, theirs = whole["optimizer_states"][0], expected["optimizer_states"][0]
    assert ours["param_groups"] == theirs["param_groups"]
    for index, entry in theirs["state"].items():
        assert all(torch.equal(ours["state"][index][key], v) for key, v in entry.items())
    for key in ("epoch", "global_step", "loops", "lr_schedulers", "hyper_parameters"):
        assert whole[key] == expected[key]
    assert {p.name for p in tmp_path.iterdir()} == {"a.ckpt", "a.pt", "a.safetensors"}


def test_an_exported_checkpoint_resumes_without_us(saved, tmp_path):
    main(["export", str(saved / "directory.ckpt"), str(tmp_path / "a.ckpt")])
    assert isinstance(Tiny.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True), Tiny)
    runner = Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=LightningEnvironment(),
    )  # fmt: skip
    with quiet():  # of reading the epoch from its beginning again
        runner.fit(tiny(), loader(2), loader(2, 4), ckpt_path=tmp_path / "a.ckpt")
    assert runner.global_step > 9


@pytest.mark.parametrize("source", ["directory.ckpt", "file.ckpt"])
def test_inspect(saved, source, capsys):
    main(["inspect", str(saved / source)])
    out = capsys.readouterr().out
    for text in (
        "complete        yes", "epoch           1", "global_step     9", "data 2, domain 2",
        f"torch {torch.__version__}", "  width: 5", "11 tensors", "first.weight",
        "5 x 1 x 3  float64", "3 x 2  complex128  96 bytes",
        "exp_avg, exp_avg_sq, step of 8 parameters", "lr 0.009", "also ", "loops",
    ):  # fmt: skip
        assert text in out, text


def test_hyperparameters_for_the_command_line(saved, tmp_path):
    """Of files and directories; weights alone have none; objects need weights_only=False."""
    for source in ("file.ckpt", "directory.ckpt"):
        assert hyperparameters(saved / source)["width"] == 5
    assert hyperparameters(Path("last")) == {}
    torch.save({"state_dict": {}, "a": Fraction(1, 2)}, tmp_path / "code.ckpt")
    assert hyperparameters(tmp_path / "code.ckpt", trusted=True) == {}
    with pytest.raises(UnsafeFileError, match=r"fractions\.Fraction .* pass weights_only=False"):
        hyperparameters(tmp_path / "code.ckpt")


def refused(capsys, words, text, code=2):
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, words)))
    written = capsys.readouterr()
    assert stop.value.code == code
    assert text in written.err + written.out
    assert len(written.err.strip().splitlines()) <= 1


def test_what_is_refused(saved, tmp_path, capsys):
    file, directory = saved / "file.ckpt", saved / "directory.ckpt"
    refused(capsys, ["export", file, tmp_path / "a.zip"], "a.zip' ends with none of .safetensors")
    refused(capsys, ["export", file, file], "is the checkpoint itself")
    refused(capsys, ["export", tmp_path / "none.ckpt", tmp_path / "a.pt"], "there is no file")
    (tmp_path / "loop.ckpt").symlink_to("loop.ckpt")
    refused(capsys, ["export", tmp_path / "loop.ckpt", tmp_path / "a.pt"], "there is no file")
    refused(capsys, ["inspect", tmp_path], "is a directory without a checkpoint in it")
    refused(capsys, ["inspect", saved], "one of them: directory.ckpt, file.ckpt")
    refused(capsys, ["inspect", tmp_path / "none.ckpt"], "there is no file")
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(file.read_bytes()[:-100])
    refused(capsys, ["inspect", cut], "is not whole, or no file of torch.save", code=1)
    torch.save({"state_dict": {}, "a": Fraction(1, 2)}, tmp_path / "code.ckpt")
    refused(capsys, ["inspect", tmp_path / "code.ckpt"], "holds a fractions.Fraction")
    main(["inspect", str(tmp_path / "code.ckpt"), "--trusted"])
    capsys.readouterr()
    part = tmp_path / "part.ckpt"
    shutil.copytree(directory, part)
    (part / "__2_0.distcp").unlink()
    refused(capsys, ["inspect", part], "complete        no: '__2_0.distcp' is missing", code=1)
    refused(capsys, ["export", part, tmp_path / "a.pt"], "is incomplete: '__2_0.distcp' is missing")
    assert not (tmp_path / "a.pt").exists()


def test_a_link_stays_a_link(saved, tmp_path):
    (tmp_path / "a.pt").symlink_to("far.pt")
    main(["export", str(saved / "file.ckpt"), str(tmp_path / "a.pt")])
    assert (tmp_path / "a.pt").is_symlink()
    assert torch.load(tmp_path / "far.pt")


def test_checkpoints_replace_a_link_as_plain_lightning_does(tmp_path):
    """Such as `last.ckpt`, a link to the best checkpoint, which must stay."""
    for name, files in (("plain", TorchCheckpointIO()), ("own", CheckpointFiles())):
        best, last = tmp_path / f"{name}.ckpt", tmp_path / f"{name}-last.ckpt"
        files.save_checkpoint({"epoch": 1}, best)
        last.symlink_to(best)
        files.save_checkpoint({"epoch": 2}, last)
        assert not last.is_symlink()
        assert files.load_checkpoint(best)["epoch"] == 1
