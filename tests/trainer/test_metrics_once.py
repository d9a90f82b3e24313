"""Sums, metrics and rates count a sample once, on however many ranks it lies."""

import csv
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric, MeanSquaredError, SumMetric
from torchmetrics.image import StructuralSimilarityIndexMeasure

import lightning_shard
from lightning_shard import SamplesPerSecond, UnsupportedOperationError
from tests import training
from tests.checkpoint.test_resume_inside_epoch import shared_path
from tests.parity import mesh_of
from tests.trainer.featured import BATCH, SAMPLES, Featured, loader, sample

MESHES = pytest.mark.parametrize("domain", [(1,), (2,), (2, 2)], ids=["4x1", "2x2", "1x(2x2)"])


class Measured(Featured):
    """torchmetrics objects, and sums and extremes that Lightning reduces."""

    def __init__(self):
        super().__init__()
        self.mse = MeanSquaredError()
        self.total = SumMetric()
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        prediction = self(batch["x"])
        errors = (prediction - batch["y"]).square().mean((1, 2, 3))
        self.mse(prediction, batch["y"])
        self.total(errors)
        self.mean(errors)
        self.log("mse", self.mse)
        self.log("total", self.total)
        self.log("mean", self.mean)
        size = len(batch["x"])
        self.log("count", float(size), reduce_fx="sum", sync_dist=True)
        self.log("samples", torch.tensor(size), reduce_fx="sum", sync_dist=True)
        self.log("worst", errors.max(), reduce_fx="max", sync_dist=True, batch_size=size)
        self.log("average", errors.mean(), sync_dist=True, batch_size=size)


def expected_errors(module):
    batch = torch.utils.data.default_collate([sample(i) for i in range(SAMPLES)])
    with torch.no_grad():
        return (module(batch["x"]) - batch["y"]).square().mean((1, 2, 3))


@pytest.mark.spmd(4)
@MESHES
def test_metrics(domain):
    module = Measured()
    errors = expected_errors(module)
    found = training.trainer(domain).validate(module, loader(2), verbose=False)[0]
    expected = {
        "mse": errors.mean(), "total": errors.sum(), "mean": errors.mean(), "count": SAMPLES,
        "samples": SAMPLES, "worst": errors.max(), "average": errors.mean(),
    }  # fmt: skip
    assert found == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-6)


@pytest.mark.spmd(2)
def test_a_metric_over_windows():
    """SSIM convolves: its metric sees split fields."""
    fields = [sample(i) for i in range(4)]
    x, y = (torch.stack([f[key] for f in fields]).sigmoid() for key in "xy")
    expected = StructuralSimilarityIndexMeasure(data_range=1.0, kernel_size=3, sigma=0.5)(x, y)
    split = [lightning_shard.shard(v, mesh_of(2), 2) for v in (x, y)]
    metric = StructuralSimilarityIndexMeasure(data_range=1.0, kernel_size=3, sigma=0.5)
    metric.process_group = dist.new_subgroups(1)[0]
    metric.update(*split)
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-10, atol=0, check_dtype=False)


class Gathers(Featured):
    def validation_step(self, batch, batch_idx):
        replicas = self.trainer.world_size // self.trainer.strategy.domain_size
        error = (self(batch["x"]) - batch["y"]).square().mean()
        gathered = self.all_gather(error)
        assert gathered.shape == (replicas,)
        self.gathered = gathered
        if self.trainer.strategy.domain_size > 1:
            with pytest.raises(UnsupportedOperationError, match="gather"):
                self.all_gather(batch["x"])


@pytest.mark.spmd(4)
@MESHES
def test_all_gather_is_of_data_replicas(domain):
    module = Gathers()
    errors = expected_errors(module)
    training.trainer(domain, limit_val_batches=1).validate(module, loader(1), verbose=False)
    torch.testing.assert_close(module.gathered, errors[: len(module.gathered)])


@pytest.mark.spmd(4)
@MESHES
def test_monitors_log_on_rank_zero(domain):
    folder = shared_path("logs")
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch["x"]), window_size=3)
    runner = training.trainer(
        domain, logger=CSVLogger(folder, flush_logs_every_n_steps=1), log_every_n_steps=1,
        callbacks=[
            LearningRateMonitor("step"), DeviceStatsMonitor(cpu_stats=True), monitor,
            SamplesPerSecond(),
        ],
    )  # fmt: skip
    replicas = dist.get_world_size() // runner.strategy.domain_size
    runner.fit(Featured(), loader(BATCH // replicas), loader(BATCH // replicas))
    dist.barrier()
    files = sorted(p.name for p in folder.rglob("*.csv"))
    assert files == ["metrics.csv"], files
    rows = list(csv.DictReader(next(folder.rglob("*.csv")).open()))
    assert sum(bool(row["lr-SGD"]) for row in rows) == SAMPLES // BATCH
    rates = [row for row in rows if row.get("train/device/samples_per_sec")]
    assert rates
    for row in rates if replicas > 1 else []:  # a single replica has one rate
        here, everywhere = (float(row[f"train/{key}samples_per_sec"]) for key in ("device/", ""))
        assert everywhere == pytest.approx(here * replicas)
    shown = [float(row["samples/s"]) for row in rows if row["samples/s"]]
    assert len(shown) == SAMPLES // BATCH
    assert min(shown) > 0


def test_samples_per_second_counts_replicas(monkeypatch):
    clock = iter([0.0, 0.5, 1.0])
    monkeypatch.setattr(
        "lightning_shard.trainer.callbacks.samples_per_second.time.perf_counter",
        lambda: next(clock),
    )
    logged = []
    module = SimpleNamespace(log=lambda name, value, **_: logged.append((name, value)))
    trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 3, "rank": 0})
    callback = SamplesPerSecond()
    callback.on_train_epoch_start(trainer, module)
    for size in (4, 2):
        batch = {"text": ["three words each"] * size, "x": torch.zeros(size, 1)}
        callback.on_train_batch_end(trainer, module, None, batch, 0)
    assert logged == [("samples/s", 24.0), ("samples/s", 18.0)]
