"""A callback that prints a line for each epoch, and at the end where everything lies."""

import math
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from lightning_shard.lightning import (
    Callback,
    LightningModule,
    ModelCheckpoint,
    Trainer,
    is_overridden,
)
from lightning_shard.trainer.callbacks.samples_per_second import samples_of_all
from lightning_shard.trainer.host import callbacks_of


class EpochReport(Callback):
    """Print a line for each epoch and a summary when training ends, and log the measurements.

    The line has the metrics of the progress bar, as means over the epoch and over all ranks where
    the module logs them so; an epoch without validation shows none of validation. `epoch_s` is in
    seconds, validation included. `epoch_samples/s` counts the samples of all data replicas, without
    the time of validation. `peak_memory_mib` is the largest value of any rank: what tensors held at
    most on its device in this epoch, or on the CPU what the process has held at most since it
    began. `memory_allocated_mib` and `memory_reserved_mib`, of devices other than the CPU, are what
    tensors and torch's allocator hold when the epoch ends. A metric that a ModelCheckpoint monitors
    is called a new best where it is better than in all epochs before.

    Source: PyTorch's tutorial "Advanced Model Training with Fully Sharded Data Parallel", which
    tracks duration and memory.
    """

    def __init__(self) -> None:
        """Begin to measure."""
        self._fit_began_s = self._began_s = self._trained_until_s = time.perf_counter()
        self._validating_s = 0.0
        self._batches = self._samples = 0
        self._before: set[str] = set()  # names of metrics that were there before a validation
        self._of_validation: set[str] = set()  # and those that a validation brought
        self._best: dict[str, float] = {}  # values of monitored metrics

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and take over the best values of a run that is resumed."""
        self._fit_began_s = self._began_s = self._trained_until_s = time.perf_counter()
        scores = {c.monitor: c.best_model_score for c in _monitors(trainer)}  # resumed: not empty
        self._best = {name: float(s) for name, s in scores.items() if name and s is not None}

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the clock, the counts and the peak of memory back."""
        self._began_s = self._trained_until_s = time.perf_counter()
        self._validating_s, self._batches, self._samples = 0.0, 0, 0
        if trainer.strategy.root_device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples of all replicas."""
        self._batches += 1
        self._samples += samples_of_all(trainer, batch)
        self._trained_until_s = time.perf_counter()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note which metrics were there before the validation."""
        self._before = {*trainer.progress_bar_metrics}

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note which metrics it brought, and take its seconds from those of training."""
        self._of_validation |= {*trainer.progress_bar_metrics} - self._before
        now_s = time.perf_counter()
        self._validating_s += now_s - self._trained_until_s
        self._trained_until_s = now_s

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log and print the epoch's line; all ranks come here, since metrics are reduced."""
        if not self._batches:  # the run resumed after the last batch of an epoch
            return
        now_s = time.perf_counter()
        training_s = self._trained_until_s - self._began_s - self._validating_s
        memory = memory_mib(trainer.strategy.root_device)
        here = torch.tensor([*memory.values()], device="cpu")
        held: Any = trainer.strategy.reduce(here, reduce_op="max")
        measured = {
            "epoch_s": now_s - self._began_s,
            "epoch_samples/s": self._samples / max(training_s, 1e-9),
            **dict(zip(memory, held.tolist(), strict=True)),
        }
        metrics = _epoch_means(trainer)  # a collective
        if not self._validating_s:  # Lightning keeps the values of an earlier epoch
            metrics = {k: v for k, v in metrics.items() if k not in self._of_validation}
        better = "".join(f", new best {name}" for name in self._new_bests(trainer))
        for logger in trainer.loggers:
            logger.log_metrics(measured, step=trainer.global_step)
        if trainer.is_global_zero:
            values = "".join(f", {name} {value:.4g}" for name, value in metrics.items())
            words = (name.removesuffix("_mib").replace("_", " ") for name in memory)
            mib = (f", {w} {n:.0f} MiB" for w, n in zip(words, held.tolist(), strict=True))
            print(
                f"Epoch {trainer.current_epoch}: {measured['epoch_s']:.1f} s{values}, "
                f"{measured['epoch_samples/s']:.4g} samples/s{''.join(mib)}{better}"
            )

    def _new_bests(self, trainer: Trainer) -> list[str]:
        """Name the monitored metrics that are better than ever before; all ranks call it."""
        found: list[str] = []
        values = trainer.callback_metrics  # a collective
        for callback in _monitors(trainer):
            name = callback.monitor
            old = not self._validating_s and name in self._of_validation
            if name is None or name in found or name not in values or old:
                continue
            value, best = float(values[name]), self._best.get(name)
            rises = callback.mode == "max"
            if math.isfinite(value) and (best is None or (value > best if rises else value < best)):
                self._best[name] = value
                found.append(name)
        return found

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print where the checkpoints are, and how to go on, unless the command line does."""
        folder = trainer.log_dir or trainer.default_root_dir  # a collective
        said = any(getattr(callback, "has_last_words", False) for callback in callbacks_of(trainer))
        if said or not trainer.is_global_zero:
            return
        ended = training_ended(trainer, time.perf_counter() - self._fit_began_s)
        print("\n".join([f"{ended} Everything is in {folder}", *checkpoint_lines(trainer)]))


def _monitors(trainer: Trainer) -> list[ModelCheckpoint]:
    """Find the callbacks that keep the best checkpoint by a metric."""
    kept = (c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint))
    return [callback for callback in kept if callback.monitor is not None]


def _epoch_means(trainer: Trainer) -> dict[str, float]:
    """Return the metrics of the bar, without the last batch's where there is a mean."""
    metrics = {k: v for k, v in trainer.progress_bar_metrics.items() if isinstance(v, float)}
    without_steps = {k: v for k, v in metrics.items() if not k.endswith("_step")}
    return {k: v for k, v in without_steps.items() if k != "samples/s"}


def call_of_trainer(stage: str, checkpoint: str) -> str:
    """Return the call by which a program runs a stage from a checkpoint."""
    return f"trainer.{stage}(module, data, ckpt_path={checkpoint!r})"


def checkpoint_lines(
    trainer: Trainer, call: Callable[[str, str], str] = call_of_trainer
) -> list[str]:
    """Say where the best checkpoint lies and what it scored, and how to test and to resume.

    Nothing is said of a test that the module has not.

    Args:
        trainer: The Trainer whose callbacks keep the checkpoints.
        call: Returns the words that run a stage from a checkpoint.
    """
    lines: list[str] = []
    can_test = is_overridden("test_step", trainer.lightning_module)
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            best, score = callback.best_model_path, callback.best_model_score
            scored = "" if score is None else f" ({callback.monitor} {float(score):.4g})"
            if best:
                lines.append(f"Best checkpoint: {best}{scored}")
                lines += [f"Test: {call('test', best)}"] if can_test else []
            if newest := callback.last_model_path or best:
                lines.append(f"Resume: {call('fit', newest)}")
    if any(isinstance(callback, ModelCheckpoint) for callback in trainer.checkpoint_callbacks):
        return lines or ["No checkpoint was written."]
    return lines or ["No checkpoint was kept; add lightning.pytorch.callbacks.ModelCheckpoint."]


def training_ended(trainer: Trainer, seconds: float) -> str:
    """Say at which step a training ended, and how long it took."""
    return f"Training ended at step {trainer.global_step} after {duration(seconds)}."


def duration(seconds: float) -> str:
    """Write seconds in words, such as 2 min 5 s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def memory_mib(device: torch.device) -> dict[str, float]:
    """Measure memory in MiB, by the name under which it is logged."""
    found = {"peak_memory_mib": peak_memory_mib(device)}
    if device.type != "cpu":
        found["memory_allocated_mib"] = torch.accelerator.memory_allocated(device) / 2**20
        found["memory_reserved_mib"] = torch.accelerator.memory_reserved(device) / 2**20
    return found


def peak_memory_mib(device: torch.device) -> float:
    """Measure the most that tensors held on a device, or the process on the CPU, in MiB."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    return torch.accelerator.max_memory_allocated(device) / 2**20
