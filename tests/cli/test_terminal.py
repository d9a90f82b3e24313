"""The lines around a run: chatter is left out, warnings stay, and the bar has one line."""

import logging
import sys
import warnings

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_shard.cli import terminal


def bar_of(columns: int, monkeypatch: pytest.MonkeyPatch, *callbacks: str) -> object:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: columns > 0)
    monkeypatch.setenv("COLUMNS", str(columns))
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[RichProgressBar()])
    named = [{"class_path": path} for path in callbacks]
    terminal.fit_bar(trainer, named[0] if len(named) == 1 else named)  # one may stand alone
    return trainer.progress_bar_callback


def test_a_narrow_terminal_has_a_bar_that_fits(monkeypatch):
    pytest.importorskip("rich")
    assert isinstance(bar_of(80, monkeypatch), TQDMProgressBar)
    assert isinstance(bar_of(160, monkeypatch), RichProgressBar)
    assert isinstance(bar_of(80, monkeypatch, "lightning.RichProgressBar"), RichProgressBar)
    in_a_file = bar_of(0, monkeypatch)
    assert isinstance(in_a_file, RichProgressBar)
    assert in_a_file._console_kwargs == {"width": 240}


@pytest.mark.parametrize(
    ("line", "stays"),
    [
        ("Seed set to 42", False),
        ("[rank: 1] Seed set to 42", False),
        ("GPU available: False, used: False", False),
        ("GPU available: True (cuda), used: True", True),
        ("💡 Tip: For seamless cloud logging and experiment tracking", False),
        ("Using bfloat16 Automatic Mixed Precision (AMP)", True),
    ],
)
def test_lines_that_say_nothing_are_left_out(line, stays):
    record = logging.LogRecord("", logging.INFO, "", 0, line, None, None)
    assert terminal.says_something(record) == stays


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_warnings_stay(command):
    with warnings.catch_warnings(record=True) as noted:
        warnings.resetwarnings()
        terminal.leave_out_chatter(command)
        warnings.warn("The dirpath has changed from 'a' to 'b', therefore", stacklevel=1)
        warnings.warn("Starting from v1.9.0, `tensorboardX` has been removed", stacklevel=1)
        warnings.warn("GPU available but not used.", stacklevel=1)
    found = [str(w.message) for w in noted]
    assert found[-1] == "GPU available but not used."
    assert len(found) == (2 if command == "fit" else 1)
