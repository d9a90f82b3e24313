"""The progress of a run, which decides how an error is shown, and the lines printed at its end."""

import shlex
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_shard.cli.help import PROGRAM
from lightning_shard.cli.positions import Given
from lightning_shard.cli.usage import UsageError
from lightning_shard.lightning import Callback, LightningModule, ModelCheckpoint, Trainer, TrainerFn
from lightning_shard.trainer.callbacks.epoch_report import checkpoint_lines, training_ended
from lightning_shard.trainer.callbacks.run_report import RunReport
from lightning_shard.trainer.callbacks.step_profile import StepProfile
from lightning_shard.trainer.host import callbacks_of


class RunState(Callback):
    """The progress of a run, and the last error while building, which the parser would hide.

    Attributes:
        given: The options that the user wrote.
        stepped: True once a batch is done. Before, one sentence says enough of any error; later,
            every error keeps its traceback.
        ckpt_path: The checkpoint that the options name, or a word such as `last`.
    """

    has_last_words = True  # EpochReport leaves them to the command line

    def __init__(self, given: Given) -> None:
        self.given = given
        self.stepped = False
        self.error: Exception | None = None
        self.trainer: Trainer | None = None
        self.started = time.monotonic()
        self.first_step: int | None = None  # the training may not begin
        self.ckpt_path: str | None = None

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

    def _refuse_a_new_model(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse `last` where there is none: Lightning would evaluate a new model."""
        fits = trainer.state.fn == TrainerFn.FITTING
        if self.ckpt_path == "last" and trainer.ckpt_path is None and not fits:
            raise UsageError(
                "ckpt_path is 'last', but no ModelCheckpoint of this configuration has a folder "
                "with a last checkpoint; give the path of the file, which fit names after 'Resume:'"
            )

    on_validation_start = on_test_start = on_predict_start = _refuse_a_new_model

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the step from which this training starts."""
        self.first_step = trainer.global_step

    def _step(self, *args: Any, **kwargs: Any) -> None:
        self.stepped = True

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _step

    def last_words(self, trainer: Trainer) -> list[str]:
        """Say after `fit` what was trained, where it lies and how to go on."""
        logs = trainer.log_dir or ""  # a collective
        lines = [training_ended(trainer, time.monotonic() - self.started)]
        if self.first_step in (None, trainer.global_step):
            lines.append("Nothing was trained: a limit was reached before, or no batch came.")
        more = f" --trainer.max_epochs {2 * max(trainer.max_epochs or 1, trainer.current_epoch)}"
        if 0 < trainer.max_steps <= trainer.global_step:
            more = f" --trainer.max_steps {2 * trainer.max_steps}"
        lines += checkpoint_lines(trainer, _command(logs, more))
        for callback in callbacks_of(trainer):
            if isinstance(callback, RunReport | StepProfile) and callback.path:
                name = "Report" if isinstance(callback, RunReport) else "Profile"
                lines.append(f"{name}: {callback.path}")
        return lines + ([f"Logs: {logs}"] if logs else [])


def words_of_an_interrupt(trainer: Trainer, has_trained: bool) -> list[str]:
    """Say after Ctrl-C how to go on, without a collective, since other ranks may have ended."""
    return [f"Interrupted {_where(trainer)}.", *_ways_on(trainer, has_trained)]


def words_of_a_failure(trainer: Trainer, has_trained: bool) -> list[str]:
    """Say after an error of the disk how to go on."""
    ended, ways = f"The run ended {_where(trainer)}.", _ways_on(trainer, has_trained)
    if trainer.state.fn == TrainerFn.FITTING:
        ways = ways or ["No checkpoint was written."]
    return [ended, *ways]


def _where(trainer: Trainer) -> str:
    """Say how far a training came, or which stage did not end: the others count no steps."""
    stage = trainer.state.fn
    if stage is None or stage == TrainerFn.FITTING:
        return f"after step {trainer.global_step}"
    return f"in {stage.value}"


def _ways_on(trainer: Trainer, has_trained: bool) -> list[str]:
    """Name the checkpoints of a training that are there; say so if none has the last steps."""
    if trainer.state.fn != TrainerFn.FITTING:  # the test after a training, or another command
        ended = checkpoint_lines(trainer, _command()) if has_trained else []
        return [line for line in ended if not line.startswith("Resume:")]
    kept = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    named = {path for c in kept for path in (c.best_model_path, c.last_model_path) if path}
    gone = [path for path in named if "://" not in path and not Path(path).exists()]
    lines = [
        line
        for line in checkpoint_lines(trainer, _command())
        if not any(path in line or shlex.quote(path) in line for path in gone)
    ] or _left_beside(gone)
    saver: Any = getattr(trainer.strategy, "saver", None)
    if named and lines and saver is not None and saver.last_step < trainer.global_step:
        lines.insert(0, f"The last checkpoint is of step {saver.last_step}.")
    return lines


def _left_beside(gone: Sequence[str]) -> list[str]:
    """Name the newest of the checkpoints in the folders of those that could not be written."""
    folders = {Path(path).parent for path in gone}
    left = [path for folder in folders for path in folder.glob("*.ckpt")]
    if not left:
        return []
    newest = str(max(left, key=lambda path: path.stat().st_mtime))
    return [f"Last whole checkpoint: {newest}", f"Resume: {_command()('fit', newest)}"]


def _command(logs: str = "", more: str = "") -> Callable[[str, str], str]:
    """Make commands with the config that lies beside the checkpoint or the logs."""

    def command(stage: str, checkpoint: str) -> str:
        folders = (Path(checkpoint).parent, Path(logs or Path(checkpoint).parents[1]))
        configs = (folder / "config.yaml" for folder in folders)
        config = next((str(path) for path in configs if path.is_file()), "...")
        words = shlex.join([stage, "--config", config, "--ckpt_path", checkpoint])
        return f"{PROGRAM} {words}" + (more if stage == "fit" else "")

    return command
