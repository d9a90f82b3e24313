"""Options that this machine or launcher cannot satisfy are refused before anything is built."""

from pathlib import Path

import pytest

from lightning_shard.trainer.asked_devices import meant
from tests.cli.test_errors import error_of
from tests.cli.test_errors import one_quiet_process as one_quiet_process


@pytest.mark.parametrize(
    ("asked", "cuda", "found"),
    [("auto", False, "xpu"), ("gpu", False, "xpu"), ("gpu", True, "cuda"), ("cpu", False, "cpu")],
)
def test_a_machine_with_intel_gpus(monkeypatch, asked, cuda, found):
    """Lightning's own "auto" is the CPU there, and its "gpu" an error."""
    for name, there in (("xpu", True), ("cuda", cuda)):
        monkeypatch.setattr(f"torch.{name}.is_available", lambda there=there: there)
    assert meant(asked) == found


def test_a_domain_of_no_ranks(capsys):
    key = "trainer.strategy.domain_parallel_size"
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", f"--{key}=0")
    assert sentence == f"{key} must be 1 or more; got 0 (on the command line)"


@pytest.mark.parametrize(
    ("text", "key"),
    [("trainer: null\n", "trainer"), ("trainer:\n  strategy:\n    # none\n", "trainer.strategy")],
    ids=["trainer", "strategy"],
)
def test_a_key_without_options(capsys, text, key):
    Path("x.yaml").write_text(text)
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", "--config", "x.yaml")
    assert sentence.startswith(f"{key} (at x.yaml:"), sentence
    assert sentence.endswith("has no options; write one below it, or leave it out")


def test_launcher_that_is_half_set(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml")
    assert sentence.startswith("the variable WORLD_SIZE is '2', but RANK is not set")
