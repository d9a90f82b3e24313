"""`plan` counts what `activation_offload` moves, as the mover of a real step does."""

from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard.lab.batches import first_batches
from lightning_shard.lab.fake_trainer import train
from lightning_shard.lab.machine import Cluster, Device, Link
from lightning_shard.lab.run import Task, on_each_rank
from lightning_shard.lightning import Callback
from lightning_shard.memory import offload
from lightning_shard.memory.paging.host_memory import MemoryInParts
from lightning_shard.memory.paging.pages import Driver
from lightning_shard.trainer import process_mesh

MIB = 2**20


class Net(LightningModule):
    """Two scales, whose finer one is needed again at the end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        fine = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(6)]
        self.first, self.fine = nn.Conv2d(2, 8, 3, padding=1), nn.Sequential(*fine)
        self.coarse = nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())

    def training_step(self, batch):
        fine = self.first(batch)
        coarse = self.coarse(nn.functional.avg_pool2d(fine, 2))
        up = nn.functional.interpolate(coarse, scale_factor=2)
        return self.fine(fine + up).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class OfThisCpu(Driver):
    """Takes the memory of the CPU for that of a device, which it frees and allocates."""

    def holds(self, tensor):
        return type(tensor) is torch.Tensor


class Moved(Callback):
    """Counts the bytes of the last step that went to the host, came back, and were there."""

    def on_train_batch_start(self, *_):
        mover = offload.MOVER
        self.pages, self.memory = [*mover._pages.values()], mover._memory
        self.before = [(p.out, p.back) for p in self.pages]
        self.memory.peak = self.memory.held

    def on_train_end(self, *_):
        before = self.before or [(0, 0)]
        out = sum(p.out for p in self.pages) - sum(o for o, _ in before)
        back = sum(p.back for p in self.pages) - sum(b for _, b in before)
        self.counts = self.memory.peak, out, back


def counted(task):
    """What the mover counts in a step of a Trainer with real numbers.

    Nobody looks where this thread waits: the look holds the frames of functions that return
    meanwhile, and what a frame holds does not leave.
    """
    mover = offload.Mover(OfThisCpu(), MemoryInParts())
    with (
        mock.patch.object(offload, "MOVER", mover),
        mock.patch.object(process_mesh, "watch_lone_waits"),
    ):
        train(task, 1, lambda: None, moved := Moved(), warm_up=1)
    return moved.counts


def fields(extent=192):
    return DataLoader(torch.randn(2, 2, extent, extent), 2)


@pytest.mark.parametrize(
    ("option", "mesh"),
    [
        (["Sequential"], (1, 1)), ("20MB", (1, 1)), ("9GB", (1, 1)),
        pytest.param("8MB", (1, 2), marks=pytest.mark.slow),
    ],
    ids=["those of a class", "a part", "all", "a part on each of two ranks"],
)  # fmt: skip
def test_bytes_on_the_host(option, mesh):
    options = lightning_shard.ShardingOptions("full", activation_offload=option)
    planned = lightning_shard.plan(Net(), fields(), mesh, sharding=options)
    task = Task(Net(), None, first_batches(Net(), fields(), "fit"), mesh,
                strategy={"sharding": options}, simulated=mesh == (1, 1))  # fmt: skip
    held, out, back = on_each_rank(counted, task)[0]
    assert (held > 0) is (option != "9GB")
    assert planned.on_host == pytest.approx(held, rel=0.02)
    assert planned.to_host == pytest.approx(out, rel=0.02)
    assert planned.from_host == pytest.approx(back, rel=0.02)


def test_copies_hide_behind_computation():
    """Those of a step begin where those of the step before were needed, not where room is gone."""
    device = Device("made up", 10**9, {"float32": 2e10}, 1e12, 1e-9, "made up", host_rate=2e9)
    cluster = Cluster(device, 1, 1, Link(1e9, 0.0), Link(1e9, 0.0))
    found = lightning_shard.plan(Net(), fields(), cluster=cluster, activation_offload="20MB")
    link = max(found.to_host, found.from_host) / device.host_rate
    assert found.to_host > 0
    assert found.seconds <= 1.15 * max(found.compute, link)
