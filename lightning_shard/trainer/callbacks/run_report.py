"""Writes report.html about a run, in its log directory."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_shard.data.atomic import partial_of
from lightning_shard.lightning import Callback, LightningModule, Trainer, rank_zero_warn
from lightning_shard.tensor.mixins import own_class
from lightning_shard.trainer.callbacks.epoch_report import (
    checkpoint_lines,
    duration,
    peak_memory_mib,
)
from lightning_shard.trainer.report import tables
from lightning_shard.trainer.report.page import literal, page, paragraph, pictures
from lightning_shard.trainer.split_summary import split_summary

MAX_POINTS = 1000


class RunReport(Callback):
    """Writes `report.html` when training ends, and again when a test follows.

    The page has the results, curves of what was logged, the pictures that callbacks saved as PNG
    files in `gallery/`, mesh, memory of each rank, versions and configuration. It holds all of this
    itself: it can be mailed, it loads nothing, and it has no script. It stays below 2 MB; older
    pictures are left out where all of them would not fit. It lies in the trainer's log directory.

    Rank 0 writes. A run that an exception ends is reported, too. If the page cannot be written, a
    warning says why, and the run goes on. A log directory on a remote file system gets none.
    """

    def __init__(self, config: str = "") -> None:
        """Choose what the page cannot find out by itself.

        Args:
            config: The configuration to show; by default the hyperparameters that module and data
                module have saved.
        """
        self.config = config
        self.path: Path | None = None  # set once the page is written
        self._folder = ""
        self._begin()

    def _begin(self) -> None:
        self._began = time.time()
        self._outcome: list[str] = []
        self._losses = MeanCurve()
        self._by_epoch: dict[str, list[tuple[float, float]]] = {}
        self._rates: dict[str, list[tuple[float, float]]] = {}
        self._of_validation: set[str] = set()
        self._before_validation: set[str] = set()
        self._validated = False
        self._split = ""
        self._peaks_mib: list[float] = []
        self._trained: dict[str, float] = {}
        self._tested: dict[str, float] = {}
        self._fits = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask for the folder of the logs on all ranks, since the answer is rank 0's."""
        self._folder = str(trainer.log_dir or trainer.default_root_dir)  # a collective

    # What is seen while training. All ranks follow, since some metrics are reduced when asked for.

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier run; `fast_dev_run` gets no report."""
        self._begin()
        self._fits = not vars(trainer)["fast_dev_run"]

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the split of the first batch in words."""
        self._split = self._split or str(split_summary(batch))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss to the mean of its window, and keep the learning rates of each window."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.add(loss * trainer.accumulate_grad_batches)
        if (batch_idx + 1) % _window(trainer) == 0:
            self._losses.close(trainer.global_step)
            self._keep_rates(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note which metrics were there before the validation."""
        self._before_validation = set(trainer.callback_metrics)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note which metrics it brought; the sanity check counts for nothing."""
        if not trainer.sanity_checking:
            self._of_validation |= set(trainer.callback_metrics) - self._before_validation
            self._validated = True

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the metrics and the peak of memory of the epoch; all ranks come here."""
        metrics = _numbers(trainer.callback_metrics)  # a collective
        for name, value in metrics.items():
            if self._validated or name not in self._of_validation:
                self._by_epoch.setdefault(name, []).append((trainer.global_step, value))
        self._trained |= metrics
        self._validated = False
        self._losses.close(trainer.global_step)
        self._losses.read()
        self._keep_rates(trainer)
        self._keep_memory(trainer)

    def _keep_rates(self, trainer: Trainer) -> None:
        for number, optimizer in enumerate(trainer.optimizers):
            name = f"optimizer {number}" if len(trainer.optimizers) > 1 else "learning rate"
            rate = float(optimizer.param_groups[0]["lr"])
            self._rates.setdefault(name, []).append((trainer.global_step, rate))

    def _keep_memory(self, trainer: Trainer) -> None:
        here = peak_memory_mib(trainer.strategy.root_device)
        everywhere: list[Any] = [here]
        if dist.is_initialized():
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, here)
        before = self._peaks_mib or everywhere  # counters begin anew with an epoch
        self._peaks_mib = [max(pair) for pair in zip(before, everywhere, strict=True)]

    # How it ends.

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the metrics of the test."""
        self._tested = _numbers(trainer.callback_metrics)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write: here all other callbacks have drawn their pictures."""
        if stage == "fit":
            epochs = "1 epoch" if trainer.current_epoch == 1 else f"{trainer.current_epoch} epochs"
            lasted = duration(time.time() - self._began)
            self._outcome = [
                f"Training ended at step {trainer.global_step}, after {epochs} and {lasted}."
            ]
        self._write(trainer, pl_module)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write the report of a run that fails, with the first line of its error."""
        said = (str(exception).strip().splitlines() or [""])[0]
        stage = trainer.state.stage.value if trainer.state.stage else "run"
        self._outcome.append(
            f"Stopped in {stage} at step {trainer.global_step} by {type(exception).__name__}"
            f"{': ' if said else ''}{said}"
        )
        self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.is_global_zero or not self._fits or "://" in self._folder:
            return
        path = Path(self._folder) / "report.html"
        try:
            text = self._page(trainer, module)
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_beside(path, text)
        except Exception as err:  # whatever it is, the run is worth more than its report
            rank_zero_warn(f"{path} was not written: {type(err).__name__}: {err}")
        else:
            self.path = path

    def _page(self, trainer: Trainer, module: LightningModule) -> str:
        began = datetime.fromtimestamp(self._began, UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._losses.read()
        window = _window(trainer)
        curves = tables.metric_charts(self._losses.points, self._by_epoch, self._rates, window)
        return page(
            f"{own_class(module).__name__}: report of a run",
            f"Began {began}. {' '.join(self._outcome)}",
            [
                ("Test", tables.result_tables(self._tested)),
                ("Last values of training and validation", tables.result_tables(self._trained)),
                ("Curves", curves),
                ("Pictures", pictures(Path(self._folder) / "gallery", self._began)),
                ("What ran", tables.mesh_table(trainer, module, self._split)),
                ("Memory", tables.memory_table(self._peaks_mib, trainer.strategy.root_device)),
                ("Checkpoints", [paragraph(line) for line in checkpoint_lines(trainer)]),
                ("Versions", tables.version_table()),
                ("Configuration", [literal(self.config or _hyperparameters(trainer, module))]),
            ],
        )


def _write_beside(path: Path, text: str) -> None:
    """Write a page that is whole, or leave the one of an earlier stage as it is."""
    partial = partial_of(path)
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class MeanCurve:
    """Collects the means of a value over windows of steps, without waiting for the device.

    Once there are too many points, two become one.
    """

    def __init__(self) -> None:
        """Begin without points."""
        self.points: list[tuple[float, float]] = []
        self._waiting: list[tuple[float, Tensor]] = []
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, value: Tensor) -> None:
        """Take the value of one step, which stays on its device."""
        value = value.detach().float().reshape(())
        self._sum = value if self._sum is None else self._sum + value
        self._count += 1

    def close(self, step: int) -> None:
        """End a window of steps: its mean becomes a point at `step`."""
        if self._sum is not None:
            self._waiting.append((step, self._sum / self._count))
        self._sum, self._count = None, 0

    def read(self) -> None:
        """Copy the means that are still on the device into `points`."""
        if not self._waiting:
            return
        values = torch.stack([value for _, value in self._waiting]).tolist()
        self.points += zip((step for step, _ in self._waiting), values, strict=True)
        self._waiting.clear()
        while len(self.points) > MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [(after[0], (before[1] + after[1]) / 2) for before, after in pairs]


def _window(trainer: Trainer) -> int:
    """The steps of one point; the Trainer sets what Lightning does not declare."""
    return max(1, vars(trainer)["log_every_n_steps"])


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _hyperparameters(trainer: Trainer, module: LightningModule) -> str:
    lines: list[str] = []
    for name, owner in (("model", module), ("data", getattr(trainer, "datamodule", None))):
        if owner is not None:
            lines.append(f"{name}: {type(owner).__name__.removeprefix('FSDP')}")
            lines += [f"  {key}: {value}" for key, value in dict(owner.hparams).items()]
    return "\n".join(lines)
