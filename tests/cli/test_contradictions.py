"""What was accepted in silence or ended in a traceback, and what a run says at its end."""

import gzip
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule

import lightning_shard
from lightning_shard.cli import main as cli
from tests.cli import test_main
from tests.cli.test_errors import error_of
from tests.cli.test_errors import one_quiet_process as one_quiet_process
from tests.cli.test_main import Net, refusal

HERE = __name__
pytestmark = test_main.pytestmark


class RefusedInTraining(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == int(self.fail_in):
            lightning_shard.launch(print, processes=0)
        return super().training_step(batch, batch_idx)


class Mistaken(Net):
    """Makes the mistake of a kind in a batch."""

    def training_step(self, batch, batch_idx):
        kind, _, late = self.fail_in.partition(" in ")
        if batch_idx == int(late or 0):
            _ = batch @ batch[0:1, :3] if kind == "torch" else {}[kind]
        return super().training_step(batch, batch_idx)


class Logged(Net):
    def validation_step(self, batch, batch_idx):
        found = super().validation_step(batch, batch_idx)
        self.log("x", found["x"])
        return found


class Untested(Logged):
    test_step = LightningModule.test_step


def test_a_number_that_is_too_small(capsys):
    words = "--trainer.gradient_clip_val=-1"
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", words)
    assert sentence == "trainer.gradient_clip_val must be 0 or more; got -1 (on the command line)"


def test_an_unknown_variable(capsys, monkeypatch):
    monkeypatch.setenv("LIGHTNING_SHARD_FIT__TRAINER__MAX_EPOCH", "3")
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml")
    assert sentence == (
        "the variable LIGHTNING_SHARD_FIT__TRAINER__MAX_EPOCH names no option; did you mean "
        "'LIGHTNING_SHARD_FIT__TRAINER__MAX_EPOCHS'?"
    )


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("domain_parallel_size=two", "domain_parallel_size must be "),
        ("domain_size=2", "unknown option 'trainer.strategy.domain_size'"),
    ],
)
def test_options_of_the_strategy_that_nobody_names(capsys, option, expected):
    """A config without `strategy:` trains with ours, so its options are known."""
    base = Path("base.yaml").read_text()
    Path("base.yaml").write_text(re.sub("  strategy:\n.*\n", "", base))
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", f"--trainer.strategy.{option}")
    assert expected in sentence


class TestRuns:
    """Runs that build and train."""

    @pytest.fixture(autouse=True)
    def one_quiet_process(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        Path("base.yaml").write_text(test_main.BASE)

    def test_refusal_in_the_first_batch(self, capsys):
        model = f"{HERE}.RefusedInTraining"
        words = ("--trainer.logger", "false", "--model", model, "--model.fail_in")
        code, lines = refusal(capsys, *words, "0")
        assert code == 1
        assert "error: processes must be 1 or more; got 0." in lines
        assert re.search(r"called at .*test_contradictions\.py:\d+$", lines[-1])
        assert "Traceback" not in "\n".join(lines)

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("torch", "error: RuntimeError: .*shapes cannot be multiplied"),
            ("key", "error: KeyError: 'key'"),
        ],
    )
    def test_a_mistake_in_the_first_batch(self, capsys, kind, expected):
        words = ("--trainer.logger", "false", "--model", f"{HERE}.Mistaken", "--model.fail_in")
        code, lines = refusal(capsys, *words, kind)
        assert code == 1
        assert [line for line in lines if line.startswith("error:")] == [lines[-2]]
        assert re.match(expected, lines[-2])
        place = r"raised in test_contradictions\.py:\d+ \(Mistaken\.training_step\)"
        assert re.search(place, lines[-1])
        assert "Traceback" not in "\n".join(lines)
        with pytest.raises(KeyError, match="key"):
            test_main.fit(*words, "key in 1")

    def test_a_later_refusal_keeps_its_traceback(self):
        model = f"{HERE}.RefusedInTraining"
        words = ("--trainer.logger", "false", "--model", model, "--model.fail_in", "1")
        with pytest.raises(ValueError, match="processes must be 1 or more"):
            test_main.fit(*words)

    def test_the_end_says_how_to_go_on(self, capsys):
        Path("ckpt.yaml").write_text(
            "trainer:\n  callbacks:\n  - class_path: ModelCheckpoint\n"
            "    init_args: {dirpath: kept, filename: best, monitor: x, save_last: true}\n"
            "  - class_path: lightning_shard.EpochReport\n"
        )
        words = ("--config", "ckpt.yaml", "--trainer.logger", "false", "--model", f"{HERE}.Logged")
        test_main.fit(*words)
        printed, out = capsys.readouterr()
        assert "Epoch 0: " in printed
        assert "Training ended" not in printed  # which is said here in words of a terminal
        assert re.search(r"Training ended at step 2 after .*\.", out)
        assert re.search(r"Best checkpoint: \S*kept/best\.ckpt \(x [-\d.e]+\)", out)
        (page,) = re.findall(r"Report: (\S*report\.html)", out)
        text = Path(page).read_text()
        assert f"class_path: {HERE}.Logged" in text
        (command,) = re.findall(r"Test: python -m lightning_shard (.*)", out)
        cli.main(command.split())
        test_main.fit(*words, "--ckpt_path", "kept/last.ckpt")
        out = capsys.readouterr().err
        assert "Nothing was trained: a limit was reached before" in out

    def test_no_test_is_proposed_that_the_module_has_not(self, capsys):
        test_main.fit("--trainer.logger", "false", "--model", f"{HERE}.Untested")
        out = capsys.readouterr().err
        assert "Best checkpoint: " in out
        assert "Resume: " in out
        assert "Test: " not in out

    def test_a_report_can_be_left_out(self, capsys):
        test_main.fit("--trainer.logger", "false", "--report", "false")
        assert "Report: " not in capsys.readouterr().err
        assert not Path("report.html").exists()

    def test_a_profile_is_written_on_demand(self, capsys):
        test_main.fit("--trainer.logger", "false", "--trainer.max_steps", "7", "--profile")
        printed, out = capsys.readouterr()
        assert re.search(r"^layer +[\d.]+ +0\.00 +0 +0$", printed, re.MULTILINE)
        (path,) = re.findall(r"Profile: (\S*profile_rank_0\.json\.gz)", out)
        assert b'"traceEvents"' in gzip.decompress(Path(path).read_bytes())


def test_a_checkpoint_of_another_model(capsys):
    saved = {"state_dict": {}, "hyper_parameters": {"_class_path": f"{HERE}.Logged", "modes": 4}}
    torch.save(saved, "other.ckpt")
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", "--ckpt_path", "other.ckpt")
    assert sentence == (
        f"'other.ckpt' was saved by the model '{HERE}.Logged', but the configuration names "
        "tests.cli.test_errors.Net; give the configuration of that run"
    )
