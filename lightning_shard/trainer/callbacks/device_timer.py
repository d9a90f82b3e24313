"""Measures how long training takes the device, by the device's own clock."""

import time
from collections.abc import Callable

import torch
from typing_extensions import override

from lightning_shard.lightning import Callback, LightningModule, Trainer


class DeviceTimer(Callback):
    """Prints and logs the elapsed device time of training, from its first batch to its last.

    The clock is a pair of events of torch.xpu, torch.cuda or torch.mps, which the device passes in
    the order of its work; on the CPU it is time.perf_counter. Validation between the epochs counts.
    Rank 0 prints, and logs `device_time_s`; `elapsed_s` has the seconds of the last fit on each
    rank.

    Source: PyTorch's tutorial of FSDP on MNIST, which prints the time between two CUDA events.
    """

    elapsed_s: float | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the device."""
        self.elapsed_s = None
        self._stop = _start_clock(trainer.strategy.root_device)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock, which waits for the device, then log and print the seconds."""
        self.elapsed_s = self._stop()
        for logger in trainer.loggers:
            logger.log_metrics({"device_time_s": self.elapsed_s}, step=trainer.global_step)
        if trainer.is_global_zero:
            kind = trainer.strategy.root_device.type
            print(f"Elapsed device time of training ({kind}): {self.elapsed_s:.3f} s")


def _start_clock(device: torch.device) -> Callable[[], float]:
    """Start a clock; the function returned waits for the device and gives the seconds since."""
    if device.type == "cpu":
        begin_s = time.perf_counter()
        return lambda: time.perf_counter() - begin_s
    new_event = torch.get_device_module(device).Event
    begin, end = new_event(enable_timing=True), new_event(enable_timing=True)
    begin.record()

    def stop() -> float:
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000  # events count milliseconds

    return stop
