"""How far a run of the command line is: what an error means to the user, and the last words.

The last words say where the checkpoints lie, and how to go on.
"""

import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shard.cli.help import PROGRAM
from lightning_shard.cli.sources import Sources
from lightning_shard.trainer.callbacks.run_report import RunReport
from lightning_shard.trainer.callbacks.step_profile import StepProfile
from lightning_shard.trainer.host import callbacks_of


class RunState(Callback):
    """How far the run is, and the last error while building, which the parser would hide.

    Attributes:
        given: What the user gave.
        stepped: Whether a batch is done. Before, one sentence says enough of any error; later,
            every error keeps its traceback.
    """

    has_last_words = True  # which EpochReport leaves to the command line

    def __init__(self, given: Sources) -> None:
        self.given = given
        self.stepped = False
        self.error: Exception | None = None
        self.trainer: Trainer | None = None
        self.started = time.monotonic()
        self.first_step: int | None = None  # of this training, which may not begin

    def stop_children(self) -> None:
        """Stop the ranks launched from here, which would report the same refusal once more."""
        launcher = self.trainer.strategy.launcher if self.trainer else None
        if launcher:
            launcher.kill(signal.SIGKILL)

    def build(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        """Build for the parser, and keep the error that it would replace by its own."""
        try:
            return class_type(*args, **kwargs)
        except Exception as err:
            self.error = err
            raise

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Steps count from here on."""
        self.first_step = trainer.global_step

    def _step(self, *args: Any, **kwargs: Any) -> None:
        self.stepped = True

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _step

    def last_words(self, trainer: Trainer) -> Iterator[str]:
        """Lines for a terminal after `fit`."""
        logs = trainer.log_dir or ""  # a collective
        steps = 0 if self.first_step is None else trainer.global_step - self.first_step
        yield f"Done in {_duration(time.monotonic() - self.started)}: {steps} steps of training."
        if steps == 0:
            yield f"  Nothing was trained: {_why(trainer)}."
        best, last = yield from _checkpoints(trainer)
        if best or last:
            words = _config(Path(best or last).parent, Path(logs))
            more = _more(trainer)
            yield f"  test it          {PROGRAM} test {words} --ckpt_path {best or last}"
            yield f"  go on            {PROGRAM} fit {words} --ckpt_path {last or best}{more}"
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
