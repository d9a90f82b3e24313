"""A line for each epoch: how long it took, what was measured, how much memory was needed."""

import resource
import time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class EpochReport(Callback):
    """Prints and logs duration and peak memory of each epoch, its validation included.

    The line also has the metrics in the progress bar. `epoch_s` is in seconds. `peak_memory_mib` is
    what tensors held at most on the device of rank 0 in this epoch; on the CPU, what the process
    has held at most since it began.

    Source: PyTorch's tutorial "Advanced Model Training with Fully Sharded Data Parallel", which
    tracks both.
    """

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_s = time.perf_counter()
        if trainer.strategy.root_device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = time.perf_counter() - self._start_s
        mib = peak_memory_mib(trainer.strategy.root_device)
        for logger in trainer.loggers:
            logger.log_metrics(
                {"epoch_s": seconds, "peak_memory_mib": mib}, step=trainer.global_step
            )
        if trainer.is_global_zero:
            metrics = trainer.progress_bar_metrics.items()
            values = ", ".join(f"{k} {v:.4g}" for k, v in metrics if isinstance(v, float))
            print(
                f"Epoch {trainer.current_epoch}: {seconds:.1f} s, {values}, "
                f"peak memory {mib:.0f} MiB"
            )


def peak_memory_mib(device: torch.device) -> float:
    """What tensors have held of a device at most, or the process of the CPU's memory, in MiB."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    return torch.accelerator.max_memory_allocated(device) / 2**20
