"""What a run says at its end: where the checkpoints lie, and how to go on."""

import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shard.cli.help import PROGRAM
from lightning_shard.trainer.callbacks.run_report import RunReport
from lightning_shard.trainer.callbacks.step_profile import StepProfile
from lightning_shard.trainer.host import callbacks_of


def last_words(trainer: Trainer, started: float, first_step: int | None) -> Iterator[str]:
    """Lines for a terminal.

    Args:
        trainer: After `fit`.
        started: The reading of `time.monotonic` when the command began, in s.
        first_step: Optimizer steps that the weights had when training began; None if it did not.
    """
    logs = trainer.log_dir or ""  # a collective
    steps = 0 if first_step is None else trainer.global_step - first_step
    yield f"Done in {_duration(time.monotonic() - started)}: {steps} steps of training."
    if steps == 0:
        yield f"  Nothing was trained: {_why(trainer)}."
    best, last = yield from _checkpoints(trainer)
    if best or last:
        words = _config(Path(best or last).parent, Path(logs))
        yield f"  test it          {PROGRAM} test {words} --ckpt_path {best or last}"
        yield f"  go on            {PROGRAM} fit {words} --ckpt_path {last or best}{_more(trainer)}"
    for callback in callbacks_of(trainer):
        if isinstance(callback, RunReport) and callback.path:
            yield f"  report           {callback.path}"
        if isinstance(callback, StepProfile) and callback.path:
            yield f"  profile          {callback.path}"
    if logs:
        yield f"  logs             {logs}"


def words_of_an_interrupt(trainer: Trainer) -> Iterator[str]:
    """Lines for a terminal after Ctrl-C, of one rank alone: the others may have ended.

    Args:
        trainer: That was interrupted.
    """
    yield f"Interrupted after step {trainer.global_step}."
    if trainer.state.fn != TrainerFn.FITTING:
        return
    best, last = yield from _checkpoints(trainer)
    if newest := last or best:
        words = _config(Path(newest).parent, Path(newest).parents[1])
        yield f"  go on            {PROGRAM} fit {words} --ckpt_path {newest}"
    else:
        yield "  No checkpoint was written."


def _checkpoints(trainer: Trainer) -> Generator[str, None, tuple[str, str]]:
    """Name them line by line; returns the best one and the last one, "" where there is none."""
    best = last = ""
    for callback in trainer.checkpoint_callbacks:
        best = getattr(callback, "best_model_path", "") or best
        last = getattr(callback, "last_model_path", "") or last
        if best and (score := getattr(callback, "best_model_score", None)) is not None:
            score_of = f" ({getattr(callback, 'monitor', '')} {float(score):.6g})"
            yield f"  best checkpoint  {best}{score_of}"
        elif best:
            yield f"  checkpoint       {best}"
    if last and last != best:
        yield f"  last checkpoint  {last}"
    return best, last


def _config(*folders: Path) -> str:
    """Words that give the options of a run, if they lie in one of its folders."""
    configs = (folder / "config.yaml" for folder in folders)
    return f"--config {next((c for c in configs if c.is_file()), '...')}"


def _why(trainer: Trainer) -> str:
    limit: Any = trainer.max_steps
    if 0 <= limit <= trainer.global_step:
        return f"the weights have {trainer.global_step} steps already, and max_steps is {limit}"
    limit = trainer.max_epochs
    if limit is not None and 0 <= limit <= trainer.current_epoch:
        return f"epoch {trainer.current_epoch} is reached already, and max_epochs is {limit}"
    return "no batch came, or a limit was reached before the first"


def _more(trainer: Trainer) -> str:
    if trainer.max_steps and 0 < trainer.max_steps <= trainer.global_step:
        return f" --trainer.max_steps {2 * trainer.max_steps}"
    return f" --trainer.max_epochs {2 * (trainer.max_epochs or 1)}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{n} {unit}" for n, unit in parts if n) or "0 s"
