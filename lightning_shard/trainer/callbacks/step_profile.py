"""Records where the time of a few training steps goes, on all ranks at once."""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile, schedule, supported_activities
from typing_extensions import override

from lightning_shard.lightning import (
    Callback,
    LightningModule,
    PyTorchProfiler,
    Trainer,
    get_filesystem,
    rank_zero_warn,
)
from lightning_shard.processes.cpu_settings import quiet_profiler
from lightning_shard.processes.errors_together import gather_to_first, together
from lightning_shard.trainer.profile.labels import labels
from lightning_shard.trainer.profile.traffic import Traffic
from lightning_shard.trainer.profile.usage import Usage, mean_usage, table, usage_by_module

FILE = "profile_rank_{}.json.gz"
METHODS = ("training_step", "backward")


class StepProfile(Callback):
    """Writes a trace of a few training steps of each rank, and prints what each module took.

    The traces are `profile_rank_0.json.gz` and so on in the trainer's log directory, torch's own,
    for https://ui.perfetto.dev or chrome://tracing. Modules, functions on split tensors and
    collectives have names in them. The table has a row for each module, without the modules in
    it: milliseconds of compute and of waiting in collectives, bytes sent and collectives, as means
    over the steps and ranks. Times are of forward and backward together.

    The recorder is torch.profiler. Nothing is installed before its first step and after its last;
    the steps that it records take longer.
    """

    def __init__(self, wait: int = 3, warmup: int = 1, active: int = 3) -> None:
        """Choose the steps, counted in batches of training.

        Args:
            wait: Steps to leave alone, in which caches fill.
            warmup: Steps after them that run under the profiler and are thrown away.
            active: Steps after those, which are recorded.

        Raises:
            ValueError: A number is negative, or `active` is not positive.
        """
        for name, number, least in (
            ("wait", wait, 0),
            ("warmup", warmup, 0),
            ("active", active, 1),
        ):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ValueError(f"{name} must be a whole number from {least} on; got {number!r}.")
        self.wait, self.warmup, self.active = wait, warmup, active
        self.path: str | None = None  # set once the trace is written
        self.usage: dict[str, Usage] = {}  # by module, on rank 0, once it is written
        self.traffic = Traffic()  # this rank's, in the recorded steps
        self._open = contextlib.ExitStack()
        self._profiler: profile | None = None
        self._steps = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second profiler.

        Raises:
            ValueError: The trainer has Lightning's PyTorchProfiler.
        """
        if stage == "fit" and isinstance(vars(trainer)["profiler"], PyTorchProfiler):
            raise ValueError(
                "StepProfile and PyTorchProfiler both use torch's profiler, which runs once in a "
                "process; give the Trainer one of them."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier training, and begin if no batch is to be waited for."""
        self._steps, self.path, self.usage = 0, None, {}
        self._begin_if_due(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the profiler on; write once the last step is recorded."""
        self._steps += 1
        if self._profiler is not None:
            self._profiler.step()
            if self._steps == self.wait + self.warmup:
                self.traffic.bytes = self.traffic.calls = 0
            if self._steps == self.wait + self.warmup + self.active:
                self._end(trainer)
        self._begin_if_due(pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a recording that the end of training cuts short, or warn that there is none."""
        if self._profiler is not None and self._steps > self.wait + self.warmup:
            self._end(trainer)
        elif self.path is None and self._steps <= self.wait + self.warmup:
            rank_zero_warn(
                f"StepProfile has recorded nothing: training ended after {self._steps} batches, "
                f"and number {self.wait + self.warmup + 1} is the first to be recorded; train "
                "longer, or lower wait and warmup."
            )
        self._drop()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop the profiler without a file."""
        self._drop()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the profiler, which another run of this process may need."""
        self._drop()

    def _begin_if_due(self, module: LightningModule) -> None:
        if self._steps != self.wait or self._profiler is not None:
            return
        wanted = {"CPU"}
        if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
            wanted.add(device.type.upper())
        activities = [a for a in supported_activities() if a.name in wanted]
        quiet_profiler()
        steps = schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1)
        self._profiler = profile(activities=activities, schedule=steps)
        self._profiler.start()
        self.traffic = self._open.enter_context(labels(module, METHODS))

    def _end(self, trainer: Trainer) -> None:
        """Put the ranks' records together; all ranks come here after the same step."""
        profiler, steps = self._profiler, self._steps - self.wait - self.warmup
        assert profiler is not None
        self._drop()
        own = usage_by_module(profiler.events() or (), steps)
        ranks = gather_to_first(own) if _several() else [own]
        folder = str(trainer.log_dir or trainer.default_root_dir)  # a collective
        _on_all(lambda: _write(profiler, folder, trainer.global_rank))
        self.path = f"{folder}/{FILE.format(0)}"
        if trainer.is_global_zero:
            self.usage = mean_usage(ranks, steps)
            print(table(self.usage))
            print(
                f"Means of {steps} steps over {len(ranks)} ranks. The trace of rank 0 is "
                f"{self.path}: open it at https://ui.perfetto.dev"
            )

    def _drop(self) -> None:
        """End recording, and take all names away."""
        self._open.close()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _on_all(step: Callable[[], None]) -> None:
    """Run `step`; if it fails on one rank, all raise."""
    if _several():
        together(step)
    else:
        step()


def _write(profiler: profile, folder: str, rank: int) -> None:
    """Write the trace of this rank, also to a place that is no file system."""
    with tempfile.TemporaryDirectory() as own:
        trace = str(Path(own) / FILE.format(rank))
        profiler.export_chrome_trace(trace)
        files: Any = get_filesystem(folder)
        files.makedirs(folder, exist_ok=True)
        files.put(trace, f"{folder}/{FILE.format(rank)}")
