"""DeviceTimer: which clock it reads, what it prints and logs."""

import csv
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from lightning_shard import DeviceTimer
from tests.checkpoint.tiny import fit
from tests.training import shared_path


class Event:
    """As those of a device: a time is there once the device has passed both."""

    made = 0

    def __init__(self, enable_timing):
        assert enable_timing
        self.position, self.passed = Event.made, False
        Event.made += 1
        self.recorded = False

    def record(self):
        self.recorded = True

    def synchronize(self):
        assert self.recorded
        self.passed = True

    def elapsed_time(self, end):
        assert self.recorded
        assert end.passed
        return 1500.0 * (end.position - self.position)


@pytest.mark.parametrize("kind", ["xpu", "cuda", "mps"])
def test_events_of_the_device(capsys, kind):
    timer, logger = DeviceTimer(), mock.Mock()
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device(kind, 0)), loggers=[logger],
        global_step=7, is_global_zero=True,
    )  # fmt: skip
    with mock.patch("torch.get_device_module", return_value=SimpleNamespace(Event=Event)) as module:
        timer.on_train_start(trainer, None)
        timer.on_train_end(trainer, None)
    module.assert_called_once_with(torch.device(kind, 0))
    assert timer.elapsed_s == 1.5
    assert capsys.readouterr().out == f"Elapsed device time of training ({kind}): 1.500 s\n"
    logger.log_metrics.assert_called_once_with({"device_time_s": 1.5}, step=7)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_a_fit_of_two_ranks():
    timer, folder = DeviceTimer(), shared_path("logs")
    fit((2,), timer, logger=CSVLogger(folder), log_every_n_steps=1)
    assert timer.elapsed_s > 0
    dist.barrier()
    (file,) = Path(folder).rglob("metrics.csv")
    rows = [row for row in csv.DictReader(file.open()) if row["device_time_s"]]
    assert len(rows) == 1
    assert rows[0]["step"] == "12"
    if dist.get_rank() == 0:
        assert float(rows[0]["device_time_s"]) == pytest.approx(timer.elapsed_s)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a device, and `-m gpu`")
def test_on_a_device():
    from lightning_shard.trainer.callbacks.device_timer import _start_clock

    device = torch.accelerator.current_accelerator()
    stop = _start_clock(torch.device(device.type, 0))
    x = torch.randn(2048, 2048, device=device)
    for _ in range(20):
        x = x @ x / 2048
    assert 0 < stop() < 60
