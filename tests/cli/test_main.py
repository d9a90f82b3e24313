"""What the command line runs: defaults, merging, what it saves, and how it reports a refusal."""

import errno
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import AdamW
from torch.utils.data import DataLoader

from lightning_modules.shared.optional import optional
from lightning_shard.cli import main as cli
from lightning_shard.cli import usage as report
from lightning_shard.cli.lightning_cli import ShardCLI
from tests.cli.test_errors import HybridShardStrategy as HybridShardStrategy
from tests.workloads.darcy.test_data import no_room_for_files_above

HERE = __name__
BASE = f"""\
trainer:
  max_steps: 2
  limit_val_batches: 1
  accelerator: cpu
  devices: 1
  strategy: auto
  enable_progress_bar: false
  enable_model_summary: false
model:
  class_path: {HERE}.Net
data:
  class_path: {HERE}.Data
"""

pytestmark = [
    # two batches of 32 numbers need neither workers nor a logging interval below 50
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
    # a resume writes where the first run wrote
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
]


class Net(BoringModel):
    tested: tuple = ()

    def __init__(
        self,
        modes: int = 8,
        fail_in: str = "",
        optimizer: OptimizerCallable = AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.fail_in, self.optimizer = fail_in, optimizer
        if fail_in == "init":
            raise ValueError("modes 8 needs at least 16 points, got 4")
        if fail_in == "bug":
            self.no_such_name()
        if fail_in == "interrupt":
            raise KeyboardInterrupt
        if fail_in == "optional":
            optional("no_such_package", "Net", "extras")

    def on_save_checkpoint(self, checkpoint):
        if self.fail_in == "saving" and self.global_step == 2:
            raise OSError(errno.ENOSPC, "'last.ckpt' cannot be written: No space left on device")

    def training_step(self, batch, batch_idx):
        if self.fail_in == "training_step":
            raise ValueError("a bug")
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        Net.tested += (self.trainer.global_step,)
        return super().test_step(batch, batch_idx)

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class NoTest(Net):
    test_step = BoringModel.__base__.test_step


class Data(LightningDataModule):
    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        self.path = path

    def setup(self, stage):
        if self.path:
            try:
                Path(self.path).read_text()
            except FileNotFoundError as err:
                raise FileNotFoundError(f"no Darcy file at '{self.path}'") from err

    def _loader(self):
        return DataLoader(RandomDataset(32, 2))

    train_dataloader = val_dataloader = test_dataloader = _loader


@pytest.fixture(autouse=True)
def one_process_in_its_own_folder(monkeypatch, tmp_path):
    for name in (*report.rank_variables(), "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Net, "tested", ())
    Path("base.yaml").write_text(BASE)


def resolved(capsys, *words):
    """The options as `--print_config` shows them."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["fit", "--config", "base.yaml", *words, "--print_config"])
    assert exit_info.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def fit(*words):
    """Train two steps, keeping everything in one folder."""
    cli.main(["fit", "--config", "base.yaml", "--trainer.default_root_dir", "runs", *words])


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as exit_info:
        fit(*words)
    return exit_info.value.code, capsys.readouterr().err.splitlines()


def test_later_files_and_options_win(capsys):
    Path("more.yaml").write_text("trainer: {max_steps: 3, max_epochs: 5}\n")
    config = resolved(capsys, "--config", "more.yaml", "--trainer.max_epochs", "7")
    assert (config["trainer"]["max_steps"], config["trainer"]["max_epochs"]) == (3, 7)
    assert (config["seed_everything"], config["test_after_fit"]) == (42, False)


@pytest.mark.parametrize("key", ["domain_parallel_size", "init_args.domain_parallel_size"])
@pytest.mark.parametrize(("text", "value"), [("2", 2), ("[2, 2]", [2, 2])])
def test_strategy_options_over_a_class_path(capsys, key, text, value):
    strategy = f"trainer: {{strategy: {{class_path: {HERE}.HybridShardStrategy}}}}\n"
    Path("hybrid.yaml").write_text(strategy)
    config = resolved(capsys, "--config", "hybrid.yaml", f"--trainer.strategy.{key}", text)
    init_args = config["trainer"]["strategy"]["init_args"]
    assert init_args == {"data_parallel_size": "auto", "domain_parallel_size": value}


def test_environment_variables_give_options(capsys, monkeypatch):
    monkeypatch.setenv("LIGHTNING_SHARD_FIT__TRAINER__NUM_NODES", "3")
    assert resolved(capsys)["trainer"]["num_nodes"] == 3


def optimizer_of(monkeypatch, *words):
    """The optimizer's resolved options, seen where the classes would be built."""
    seen = []
    monkeypatch.setattr(ShardCLI, "instantiate_classes", lambda self: seen.append(self.config))
    monkeypatch.setattr(ShardCLI, "after_instantiate_classes", lambda self: None)
    monkeypatch.setattr(ShardCLI, "_run_subcommand", lambda self, name: None)
    cli.main(["fit", "--config", "base.yaml", *words])
    return seen[0]["fit"]["model"]["init_args"]["optimizer"]["init_args"]


def test_another_optimizer_starts_from_its_own_defaults(monkeypatch):
    assert optimizer_of(monkeypatch)["weight_decay"] == 0.01
    sgd = ("--model.init_args.optimizer", "torch.optim.SGD")
    assert optimizer_of(monkeypatch, *sgd)["weight_decay"] == 0
    given = (*sgd, "--model.init_args.optimizer.weight_decay", "0.3", "--model.optimizer.lr", "1")
    options = optimizer_of(monkeypatch, *given)
    assert (options["weight_decay"], options["lr"]) == (0.3, 1)


@pytest.mark.slow
def test_fit_saves_its_options_and_resumes_in_place():
    Path("ckpt.yaml").write_text(
        "trainer:\n  logger: {class_path: CSVLogger, init_args: {save_dir: runs, version: 0}}\n"
        "  callbacks:\n  - class_path: ModelCheckpoint\n"
        "    init_args: {dirpath: kept, save_last: true}\n"
    )
    words = ("--config", "ckpt.yaml", "--model.init_args.optimizer", "SGD")
    fit(*words)
    fit(*words, "--trainer.max_steps", "4", "--ckpt_path", "kept/last.ckpt")
    log_dir = Path("runs/lightning_logs/version_0")
    for folder in (log_dir, Path("kept")):
        saved = yaml.safe_load((folder / "config.yaml").read_text())
        assert saved["trainer"]["max_steps"] == 4
    hparams = yaml.safe_load((log_dir / "hparams.yaml").read_text())
    assert hparams["trainer"]["max_steps"] == 4
    assert torch.load("kept/last.ckpt", weights_only=True)["global_step"] == 4


def test_paths_in_the_home_of_the_user(monkeypatch, tmp_path, capsys):
    """A shell leaves `~` as it is behind `=`, and so does a file."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    quiet = "--trainer.logger=false", "--trainer.default_root_dir=~/runs"
    fit(*quiet, "--model.init_args.modes=9")
    kept = tmp_path / "home/runs/checkpoints/epoch=0-step=2.ckpt"
    again = f"--ckpt_path=~/{kept.relative_to(tmp_path / 'home')}"
    fit(*quiet, "--trainer.max_steps=4", again)
    steps = [torch.load(p, weights_only=True)["global_step"] for p in kept.parent.glob("*.ckpt")]
    assert 4 in steps
    assert "modes is 9 as in ckpt_path" in capsys.readouterr().err
    assert not Path("~").exists()


def test_saved_config_runs_again(capsys):
    fit("--trainer.logger", "false")
    with pytest.raises(SystemExit):
        cli.main(["fit", "--config", "runs/config.yaml", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_steps"] == 2


@pytest.mark.quick_rows("False")
@pytest.mark.parametrize("asked", [False, True])
def test_test_after_fit_uses_the_final_weights(asked):
    fit("--trainer.logger", "false", "--test_after_fit", str(asked).lower())
    assert Net.tested == ((2, 2) if asked else ())


def test_test_after_fit_needs_a_test_step(capsys):
    words = ("--model", f"{HERE}.NoTest", "--test_after_fit", "true", "--trainer.logger", "false")
    code, lines = refusal(capsys, *words)
    assert code == 2
    assert lines[-1].startswith("error: test_after_fit is true but NoTest has no test_step")


def test_refusal_by_a_module_is_one_sentence(capsys):
    code, lines = refusal(capsys, "--model.fail_in", "init")
    assert code == 1
    assert lines[-2] == "error: modes 8 needs at least 16 points, got 4"
    assert "raised in test_main.py:" in lines[-1]
    assert "(Net.__init__); LIGHTNING_SHARD_TRACEBACK=1" in lines[-1]


def test_refusal_by_the_data_shows_the_cause(capsys):
    code, lines = refusal(capsys, "--data.path", "none.h5", "--trainer.logger", "false")
    assert code == 1
    assert lines[-3] == "error: no Darcy file at 'none.h5'"
    assert lines[-2].strip().startswith("caused by FileNotFoundError: [Errno 2]")
    assert "(Data.setup)" in lines[-1]


def test_a_traceback_that_is_switched_off(capsys, monkeypatch):
    monkeypatch.setenv("LIGHTNING_SHARD_TRACEBACK", "0")
    code, lines = refusal(capsys, "--data.path", "none.h5", "--trainer.logger", "false")
    assert code == 1
    assert "error: no Darcy file at 'none.h5'" in lines


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("LIGHTNING_SHARD_TRACEBACK", "1")
    with pytest.raises(ValueError, match="a bug"):
        fit("--model.fail_in", "training_step", "--trainer.logger", "false")
    with pytest.raises(ValueError, match="modes 8 needs"):
        fit("--model.fail_in", "init")


class Refuses(DDPStrategy):
    def __init__(self, shape: int = 1) -> None:
        raise ValueError("65 rows cannot be split over 4 ranks")


class RefusesToLog(CSVLogger):
    def __init__(self, save_dir: str = "x") -> None:
        raise ValueError("65 rows cannot be split over 4 ranks")


@pytest.mark.parametrize(
    "words",
    [
        ("--trainer.strategy.class_path", f"{HERE}.Refuses", "--trainer.strategy.shape", "2"),
        (f"--trainer.logger={HERE}.RefusesToLog",),
    ],
)
def test_refusal_inside_a_union_of_types(capsys, words):
    code, lines = refusal(capsys, *words)
    assert code == 1
    assert lines[-2] == "error: 65 rows cannot be split over 4 ranks"
    assert "raised in test_main.py:" in lines[-1]


def test_bug_in_a_constructor_keeps_its_type(capsys):
    code, lines = refusal(capsys, "--model.fail_in", "bug")
    assert code == 1
    assert lines[-3] == "error: AttributeError: 'Net' object has no attribute 'no_such_name'"


def test_the_script_finds_modules_of_the_working_folder(monkeypatch, tmp_path):
    """As `python -m lightning_shard` does; the folder of a script is that of the environment."""
    (tmp_path / "module_of_this_folder.py").write_text("found = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    seen = []
    monkeypatch.setattr(
        cli, "main", lambda: seen.append(importlib.import_module("module_of_this_folder").found)
    )
    cli.script()
    assert seen == [3]


def test_ctrl_c_before_training_is_one_word(capsys):
    """What is imported then is nothing of the user's, and 30 lines of it hide the last of his."""
    with pytest.raises(SystemExit) as ended:
        fit("--model.fail_in", "interrupt")
    assert ended.value.code == 130
    assert capsys.readouterr().err.endswith("\nInterrupted.\n")


def test_the_way_out_that_a_module_names_is_the_only_one(capsys):
    """The package of another name on the index may be anything."""
    _, lines = refusal(capsys, "--model.fail_in", "optional")
    told = [line for line in lines if "pip install" in line]
    assert len(told) == 1
    assert "pip install 'lightning-shard[extras]'" in told[0]


def test_a_full_disk_is_one_sentence_after_steps_too(capsys):
    """Lines of the traceback tell nothing of a disk; the last whole checkpoint is told instead."""
    code, lines = refusal(capsys, "--model.fail_in", "saving")
    assert code == 1
    assert "error: [Errno 28] 'last.ckpt' cannot be written: No space left on device" in lines
    assert not any("Traceback" in line for line in lines)
    said = " ".join(lines)
    assert "The run ended after step 2." in said
    assert "No checkpoint was written." in said


def test_a_full_disk_leaves_the_checkpoint_before(capsys, tmp_path):
    """Lightning has forgotten it by then: it remembers the one that it is about to write."""
    kept = {"dirpath": str(tmp_path), "every_n_train_steps": 1, "filename": "{step}"}
    words = [f"--trainer.callbacks.{name}={value}" for name, value in kept.items()]
    callback = "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"
    code, lines = refusal(capsys, "--model.fail_in", "saving", callback, *words)
    assert code == 1
    whole = tmp_path / "step=1.ckpt"
    assert [*tmp_path.glob("*.ckpt")] == [whole]
    assert f"Last whole checkpoint: {whole}" in [line.strip() for line in lines]
    assert any(line.strip().startswith("Resume: ") and str(whole) in line for line in lines)


def test_a_disk_that_is_full_before_the_training(capsys):
    """The parser, which writes this file, replaces the error by one without a traceback."""
    with no_room_for_files_above(500):
        code, lines = refusal(capsys)
    assert code == 1
    (error,) = (line for line in lines if line.startswith("error: "))
    assert error.endswith("/config.yaml' cannot be written: File too large (EFBIG)")


def test_no_tip_comes_before_the_first_word(capfd, caplog):
    with caplog.at_level("INFO"):
        fit("--trainer.logger", "false")
    assert "Tip" not in caplog.text + capfd.readouterr().err


def test_an_option_that_a_refusal_names_has_its_place(capsys):
    Path("modes.yaml").write_text("model:\n  init_args:\n    modes: 8\n")
    _, lines = refusal(capsys, "--model.fail_in", "init", "--config", "modes.yaml")
    assert lines[-3] == "error: modes 8 needs at least 16 points, got 4"
    assert lines[-1].strip() == "model.modes is set at modes.yaml:3"


def test_refusal_on_another_rank_alone_is_still_said(capsys, monkeypatch):
    monkeypatch.setattr(report, "PATIENCE_S", 0.0)
    started = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    for name, value in (started | {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    code, lines = refusal(capsys, "--model.fail_in", "init", "--trainer.devices", "4")
    assert code == 1, lines
    assert lines[-2] == "[rank 3] error: modes 8 needs at least 16 points, got 4"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--version"], "lightning-shard "),
        # slow: tests/trainer/test_interrupt.py runs this command, too
        pytest.param(
            ["fit", "--config", "base.yaml", "--trainer.logger", "false"],
            "max_steps=2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_module_runs_as_a_command(words, said):
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "lightning_shard", *words]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.quick_rows("--help")
@pytest.mark.parametrize("words", [["--help"], ["fit", "--help"], ["ops"]], ids=" ".join)
def test_a_reader_that_has_enough_ends_a_command_quietly(words):
    """As `... | head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lightning_shard", *words]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
