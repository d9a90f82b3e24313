"""Each mistake on the command line gives one sentence, exit code 2, and nothing is built."""

from pathlib import Path
from typing import Literal

import pytest
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import AdamW

from lightning_shard.cli import main as cli
from lightning_shard.cli import usage as report
from lightning_shard.cli.lightning_cli import ShardCLI

HERE = __name__
BASE = f"""\
trainer:
  max_epochs: 1
  accelerator: cpu
  strategy:
    class_path: {HERE}.HybridShardStrategy
model:
  class_path: {HERE}.Net
data:
  class_path: {HERE}.Data
"""
CALLBACK = "trainer:\n  callbacks:\n  - class_path: {}\n    init_args:\n      {}: x\n"
SGD = "model:\n  init_args:\n    optimizer:\n      class_path: torch.optim.SGD\n      init_args:\n"


class HybridShardStrategy(DDPStrategy):
    """Stands in for the strategy: only its name and its options matter before anything is built."""

    def __init__(
        self,
        data_parallel_size: int | str = "auto",
        domain_parallel_size: int | Literal["auto"] | tuple[int, ...] = 1,
    ) -> None:
        raise AssertionError("built")


class Net(LightningModule):
    def __init__(self, modes: int = 8, optimizer: OptimizerCallable = AdamW) -> None:
        raise AssertionError("built")


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4, path: str | None = None) -> None:
        raise AssertionError("built")


class NeedsWidth(LightningModule):
    def __init__(self, width: int) -> None:
        raise AssertionError("built")


@pytest.fixture(autouse=True)
def one_quiet_process(monkeypatch, tmp_path):
    for name in (*report.rank_variables(), "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        ShardCLI, "instantiate_classes", lambda self: pytest.fail("went on to build")
    )
    Path("base.yaml").write_text(BASE)


def error_of(capsys, *args):
    """Run a command that must be refused; return the sentence without `error: ` and the hint."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(args)
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    assert sum(line.startswith("error: ") for line in lines) == 1
    assert len(lines) <= 2
    assert "usage:" not in err
    assert "Traceback" not in err
    return lines[0].removeprefix("error: "), lines[1].strip() if len(lines) == 2 else ""


FILES = {
    "trainer key": (
        "trainer:\n  max_epoch: 1\n",
        "unknown option 'trainer.max_epoch' at x.yaml:2; did you mean 'max_epochs'?",
    ),
    "top key": (
        "modle:\n  x: 1\n",
        "unknown option 'modle' at x.yaml:1; did you mean 'model'?",
    ),
    "model key": (
        "model:\n  init_args:\n    mode: 1\n",
        "unknown option 'model.init_args.mode' at x.yaml:3; did you mean 'modes'?",
    ),
    "model key, nothing near": (
        "model:\n  init_args:\n    zzz: 1\n",
        "unknown option 'model.init_args.zzz' at x.yaml:3; accepted here: modes, optimizer",
    ),
    "data key": (
        "\n\ndata:\n  init_args:\n    batchsize: 1\n",
        "unknown option 'data.init_args.batchsize' at x.yaml:5; did you mean 'batch_size'?",
    ),
    "strategy key": (
        "trainer:\n  strategy:\n    init_args:\n      domain_size: 2\n",
        "unknown option 'trainer.strategy.init_args.domain_size' at x.yaml:4; "
        "did you mean 'domain_parallel_size'?",
    ),
    "callback key": (
        CALLBACK.format("ModelCheckpoint", "monitr"),
        "unknown option 'trainer.callbacks.0.init_args.monitr' at x.yaml:5; "
        "did you mean 'monitor'?",
    ),
    "optimizer key": (
        SGD + "        momentun: 1\n",
        "unknown option 'model.init_args.optimizer.init_args.momentun' at x.yaml:6; "
        "did you mean 'momentum'?",
    ),
    "model class": (
        f"model:\n  class_path: {HERE}.Nett\n",
        f"unknown class '{HERE}.Nett' for model.class_path at x.yaml:2: module '{HERE}' "
        "has no attribute 'Nett'; "
        "did you mean 'Net'?",
    ),
    "class of another kind": (
        f"model:\n  class_path: {HERE}.Data\n",
        f"unknown class '{HERE}.Data' for model.class_path at x.yaml:2: it is not a "
        "subclass of LightningModule",
    ),
    "module of a class": (
        "data:\n  class_path: no_such_package.Data\n",
        "unknown class 'no_such_package.Data' for data.class_path at x.yaml:2: No module named "
        "'no_such_package'",
    ),
    "callback class": (
        CALLBACK.format("ModelChekpoint", "monitor"),
        "unknown class 'ModelChekpoint' for trainer.callbacks.0.class_path at x.yaml:3; "
        "did you mean 'ModelCheckpoint'?",
    ),
    "optimizer class": (
        SGD.replace("SGD", "SDG").removesuffix("      init_args:\n"),
        "unknown class 'torch.optim.SDG' for model.init_args.optimizer.class_path at x.yaml:4: "
        "module 'torch.optim' has no attribute 'SDG'; did you mean 'SGD'?",
    ),
    "type": (
        "model:\n  init_args:\n    modes: eight\n",
        "model.init_args.modes must be an integer; got 'eight' at x.yaml:3",
    ),
    "type that a later file corrects": (
        "trainer:\n  num_nodes: many\n",
        "trainer.num_nodes must be an integer; got 'many' at x.yaml:2",
    ),
    "type of an optimizer option": (
        SGD + "        lr: fast\n",
        "model.init_args.optimizer.init_args.lr must be a number; got 'fast' at x.yaml:6",
    ),
    "required option of a class": (
        f"model:\n  class_path: {HERE}.NeedsWidth\n",
        "the option 'model.init_args.width' is missing: the class needs it (at x.yaml:2)",
    ),
    "precision": (
        "trainer:\n  precision: bf16-mixd\n",
        "got 'bf16-mixd' at x.yaml:2; did you mean 'bf16-mixed'?",
    ),
    "checkpoint": (
        "ckpt_path: bases.ckpt\n",
        "ckpt_path 'bases.ckpt' (at x.yaml:1) does not exist; did you mean 'base.ckpt'?",
    ),
    "YAML syntax": (
        "trainer:\n  max_epochs: [1\nmodel: 3\n",
        "x.yaml:3 is not valid YAML: expected ',' or ']', but got ':'",
    ),
    "YAML list": ("- trainer\n", "x.yaml:1 must be a mapping"),
    "comments only": ("# trainer:\n", "x.yaml has no options; write some, such as 'trainer:'"),
}


@pytest.mark.parametrize(("text", "expected"), FILES.values(), ids=FILES.keys())
def test_mistakes_in_a_file_name_its_line(capsys, text, expected):
    Path("x.yaml").write_text(text)
    Path("base.ckpt").touch()
    Path("last.yaml").write_text("trainer:\n  num_nodes: 1\n")
    files = ("base.yaml", "x.yaml", "last.yaml")
    sentence, _ = error_of(capsys, "fit", *(word for f in files for word in ("--config", f)))
    assert expected in sentence


WORDS = {
    "no words": ([], "a subcommand is missing: give one of fit, validate, test, predict"),
    "subcommand": (["fti"], "unknown subcommand 'fti'; did you mean 'fit'?"),
    "options only": (
        ["--trainer.max_epochs", "3"],
        "a subcommand is missing before '--trainer.max_epochs'",
    ),
    "subcommand last": (
        ["--config", "base.yaml", "fit"],
        "the subcommand 'fit' comes first, options after it",
    ),
    "no model": (["fit"], "the option 'model' is missing: it names the LightningModule"),
    "no data": (["fit", "--model", f"{HERE}.Net"], "the option 'data' is missing"),
    "missing file": (
        ["fit", "--config", "bsae.yaml"],
        "config file 'bsae.yaml' does not exist; did you mean 'base.yaml'?",
    ),
    "stray word": (["fit", "base.yaml"], "unexpected 'base.yaml' on the command line"),
    "option": (
        ["fit", "--config", "base.yaml", "--trainer.max_epoch", "3"],
        "unknown option 'trainer.max_epoch' on the command line; did you mean 'max_epochs'?",
    ),
    "short option": (
        ["fit", "--config=base.yaml", "--model.mode=3"],
        "unknown option 'model.mode' on the command line; did you mean 'modes'?",
    ),
    "option of an added callback": (
        [
            "fit",
            "--config",
            "base.yaml",
            "--trainer.callbacks+=Timer",
            "--trainer.callbacks.durations",
            "3",
        ],
        "unknown option 'trainer.callbacks.durations' on the command line; "
        "did you mean 'duration'?",
    ),
    "value": (
        ["fit", "--config", "base.yaml", "--trainer.max_epochs", "three"],
        "trainer.max_epochs must be an integer or null; got 'three' on the command line",
    ),
    "the best of a run before": (
        ["predict", "--config", "base.yaml", "--ckpt_path", "best"],
        "ckpt_path 'best' (on the command line) is of a training in the same program, and a "
        "command begins without one; give the file that fit names after 'Best checkpoint:'",
    ),
    "short class": (
        ["fit", "--model", "NedsWidth", "--data", "Data"],
        "unknown class 'NedsWidth' for model on the command line; did you mean 'NeedsWidth'?",
    ),
}


@pytest.mark.parametrize(("words", "expected"), WORDS.values(), ids=WORDS.keys())
def test_mistakes_on_the_command_line(capsys, monkeypatch, words, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sentence, _ = error_of(capsys, *words)
    assert expected in sentence


def test_hint_shows_the_swapped_command(capsys):
    _, hint = error_of(capsys, "--config", "base.yaml", "fit")
    assert hint == "python -m lightning_shard fit --config base.yaml"


def test_environment_variable_is_named(capsys, monkeypatch):
    monkeypatch.setenv("LIGHTNING_SHARD_FIT__TRAINER__MAX_EPOCHS", "x")
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml")
    assert sentence.endswith("got 'x' in the variable LIGHTNING_SHARD_FIT__TRAINER__MAX_EPOCHS")


@pytest.mark.parametrize("name", report.rank_variables())
def test_other_ranks_exit_silently(capsys, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["fti"])
    assert exit_info.value.code == 2
    assert capsys.readouterr() == ("", "")
