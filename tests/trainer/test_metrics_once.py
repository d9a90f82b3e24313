"""Sums, metrics and rates count a sample once, on however many ranks it lies."""

import copy
import csv
import gc
import pickle
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader
from torchmetrics import (
    CatMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MetricTracker,
    SpearmanCorrCoef,
    SumMetric,
)
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision
from torchmetrics.image import StructuralSimilarityIndexMeasure

import lightning_shard
from lightning_shard import SamplesPerSecond, UnsupportedOperationError
from tests import training
from tests.checkpoint.test_resume_inside_epoch import shared_path
from tests.pairs import choose
from tests.parity import mesh_of
from tests.trainer.featured import (
    BATCH,
    QUIET,
    SAMPLES,
    Featured,
    fit_alone,
    fit_sharded,
    loader,
    sample,
)
from tests.trainer.test_fabric import set_up

MESHES, IDS = [(1,), (2,), (2, 2)], ["4x1", "2x2", "1x(2x2)"]
ON_MESHES = pytest.mark.parametrize("domain", choose(MESHES, fast=[(2,)]), ids=IDS)


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


@pytest.mark.quick_rows("4x1")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", MESHES, ids=IDS)
def test_metrics(domain):
    module = Measured()
    errors = expected_errors(module)
    found = training.trainer(domain).validate(module, loader(2), verbose=False)[0]
    expected = {
        "mse": errors.mean(), "total": errors.sum(), "mean": errors.mean(), "count": SAMPLES,
        "samples": SAMPLES, "worst": errors.max(), "average": errors.mean(),
    }  # fmt: skip
    assert found == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-6)


@contextmanager
def double():
    """Let metrics, which make numbers of the default dtype, make float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Listed(Featured):
    """Metrics that keep all they have seen, in every way in which programs hold metrics."""

    def __init__(self, metric):
        super().__init__()
        self.save_hyperparameters(ignore=["norm"])
        self.metric = metric  # a hyper-parameter, too
        self.auroc = BinaryAUROC()
        self.spearman = SpearmanCorrCoef()
        self.kept = CatMetric()
        self.several = MetricCollection([BinaryAveragePrecision(), MeanSquaredError()])
        self.tracker = MetricTracker(BinaryAUROC())
        self.on_step = SpearmanCorrCoef(dist_sync_on_step=True)
        self.steps = []

    def validation_step(self, batch, batch_idx):
        p, y = self(batch["x"]).sigmoid().flatten(), batch["y"].flatten()
        self.steps.append(self.on_step(p, y))
        t = (y > 0).long()
        self.auroc(p, t)
        self.log("auroc", self.auroc)
        self.spearman.update(p, y)
        self.metric.update(p, t)
        self.kept.update(p)
        self.several.update(p, t)
        self.tracker.update(p, t)

    def on_train_epoch_start(self):
        self.clone = pickle.loads(pickle.dumps(copy.deepcopy(self.several.clone())))

    def on_validation_epoch_start(self):
        self.tracker.increment()

    def on_validation_epoch_end(self):
        kept, several = self.kept.compute(), self.several.compute()
        self.found = torch.stack([
            self.spearman.compute(), self.metric.compute(), kept.square().mean(),
            *several.values(), self.tracker.compute(), torch.tensor(self.tracker.best_metric()),
        ])  # fmt: skip
        self.spearman.reset()
        self.kept.reset()
        self.several.reset()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        p, t = self(batch["x"]).sigmoid().flatten(), (batch["y"].flatten() > 0).long()
        self.clone.update(p, t)

    def on_train_epoch_end(self):
        self.copied = torch.stack([*self.clone.compute().values()])


@pytest.mark.slow
@pytest.mark.spmd(4)
@ON_MESHES
def test_metrics_that_keep_what_they_have_seen(domain):
    """Copied, pickled and tracked, each is as on one process; a checkpoint leaves it out."""
    with double():
        alone, split = (Listed(BinaryAveragePrecision()) for _ in range(2))
        for metric in alone.modules():
            if isinstance(metric, Metric):  # each rank is a run of its own here
                metric.sync_on_compute = metric._to_sync = metric.dist_sync_on_step = False
        expected = fit_alone(alone)
        runner = fit_sharded(split, domain)
        auroc = (
            runner.callback_metrics["auroc"].double(),
            expected.callback_metrics["auroc"].double(),
        )
        for found, right in ((split.found, alone.found), (split.copied, alone.copied), auroc):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=0)
        path = shared_path("listed.ckpt")
        runner.save_checkpoint(path)
        saved = torch.load(path, weights_only=False)["hyper_parameters"]
        assert ("metric" in saved) == (domain == (1,))
        given = {"metric": BinaryAveragePrecision(), "weights_only": False}
        loaded = Listed.load_from_checkpoint(path, **given)
        for name, weight in alone.network.state_dict().items():
            found = loaded.network.state_dict()[name]
            torch.testing.assert_close(found, weight, rtol=1e-10, atol=1e-12)
        assert not any(isinstance(part, dist.ProcessGroup) for part in vars(split.metric).values())


@pytest.mark.slow
@pytest.mark.spmd(4)
@ON_MESHES
def test_the_value_of_a_step_is_of_all_replicas_if_it_is_asked_for(domain):
    with double():
        module = Listed(BinaryAveragePrecision())
        runner = training.trainer(domain)
        runner.validate(module, loader(1, 4), verbose=False)
        replicas = dist.get_world_size() // runner.strategy.domain_size
        for step, found in enumerate(module.steps):
            batch = torch.utils.data.default_collate(
                [sample(step * replicas + i) for i in range(replicas)]
            )
            with torch.no_grad():
                p = module(batch["x"]).sigmoid().flatten()
            alone = SpearmanCorrCoef(sync_on_compute=False)(p, batch["y"].flatten())
            torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)


class MeansOfBatches(Metric):
    """Reads a list batch by batch, as metrics of whole volumes do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.add_state("errors", [], dist_reduce_fx="cat")

    def update(self, errors):
        self.errors.append(errors)

    def compute(self):
        return torch.stack([each.mean() for each in self.errors]).square().mean()


class ReadsLists(Featured):
    def __init__(self, **options):
        super().__init__()
        self.metric = MeansOfBatches(**options)

    def validation_step(self, batch, batch_idx):
        self.metric.update((self(batch["x"]) - batch["y"]).square())
        self.log("metric", self.metric)


@pytest.mark.spmd(2)
def test_the_metric_of_one_replica_reads_a_list_as_in_one_process():
    """It had read one tensor of all batches, in silence."""
    single = ReadsLists(sync_on_compute=False)  # each rank is a run of its own here
    batches = loader(3)
    found = training.trainer((2,)).validate(ReadsLists(), batches, verbose=False)
    runner = Trainer(devices=1, plugins=LightningEnvironment(), **QUIET)
    wanted = runner.validate(single, batches, verbose=False)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)


class Partly(Featured):
    """The second of two replicas sees another kind of tensor, or none."""

    def __init__(self, other):
        super().__init__()
        self.metric, self.other = CatMetric(), other

    def validation_step(self, batch, batch_idx):
        replica = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        if replica == 0 or self.other == "world":
            self.metric.update(self(batch["x"]))
        elif self.other == "whole":
            self.metric.update(torch.ones(3, dtype=torch.float64))

    def on_validation_epoch_end(self):
        if self.other == "world":
            self.metric.process_group = dist.group.WORLD
        self.total = self.metric.compute().sum()


@pytest.mark.spmd(4)
def test_replicas_that_have_seen_other_tensors():
    module = Partly("nothing")
    training.trainer((2,)).validate(module, loader(1, 4), verbose=False)
    with torch.no_grad():
        expected = sum(module(sample(i)["x"][None]).sum() for i in (0, 2))
    torch.testing.assert_close(module.total, expected.float())  # CatMetric makes float32


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("other", "sentence"), [("whole", "whole on others"), ("world", "leave process_group out")]
)
def test_states_that_cannot_be_counted_are_refused(other, sentence):
    with pytest.raises(UnsupportedOperationError, match=sentence):
        training.trainer((2,)).validate(Partly(other), loader(1, 4), verbose=False)


@pytest.mark.spmd(4)
def test_a_run_counts_until_another_trainer_takes_the_module():
    module = Measured()
    training.trainer((2,)).validate(module, loader(2), verbose=False)
    module.total.update(torch.tensor(1.0))
    assert module.total.compute() == 2  # replicas
    fit_alone(module, limit_train_batches=1, limit_val_batches=0)
    total = SumMetric()
    total.update(torch.tensor(1.0))
    assert total.compute() == 4  # processes


def one_of_each() -> float:
    total = SumMetric()
    total.update(torch.tensor(1.0))
    return float(total.compute())


def validated(domain):
    module, trainer = Measured(), training.trainer((domain,))
    trainer.validate(module, loader(2), verbose=False)
    return module, trainer


@pytest.mark.spmd(4)
def test_a_run_counts_until_another_run_begins():
    """Also where the module of the first lives on, as it does on one rank without the others."""
    module, other = Measured(), Measured()
    training.trainer((2,)).validate(module, loader(2), verbose=False)
    assert one_of_each() == 2  # replicas
    fit_alone(other, limit_train_batches=1, limit_val_batches=0)
    assert one_of_each() == 4  # processes


@pytest.mark.quick_rows("set_up")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("run", [validated, set_up])
def test_ranks_count_alike_though_one_has_freed_the_run(run):
    """Python frees what refers to itself at another moment on each rank."""
    kept = run(2)
    if dist.get_rank():
        del kept
    gc.collect()
    assert one_of_each() == 1  # replica
    fit_alone(Measured(), limit_train_batches=1, limit_val_batches=0)
    assert one_of_each() == 2  # processes


@pytest.mark.spmd(2)
def test_each_batch_of_fabric_counts_its_replicas_again():
    run = set_up(2)
    fit_alone(Measured(), limit_train_batches=1, limit_val_batches=0)
    assert one_of_each() == 2  # processes
    for _ in run.fabric.setup_dataloaders(loader(2)):
        assert one_of_each() == 1  # replica


class RunsAnother(Measured):
    """Trains a probe by a Trainer of its own."""

    def on_validation_start(self):
        fit_alone(Measured(), limit_train_batches=1, limit_val_batches=0)
        assert one_of_each() == 2  # replicas


@pytest.mark.spmd(4)
def test_a_run_inside_of_another_does_not_end_it():
    training.trainer((2,)).validate(RunsAnother(), loader(2), verbose=False)


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
        replicas = self.trainer.world_size
        error = (self(batch["x"]) - batch["y"]).square().mean()
        gathered = self.all_gather(error)
        assert gathered.shape == (replicas,)
        self.gathered = gathered
        fields = self.all_gather(batch["x"])
        assert fields.shape == (replicas, *batch["x"].shape)
        assert type(fields) is type(batch["x"])  # a split tensor stays split


@pytest.mark.spmd(4)
@ON_MESHES
def test_all_gather_is_of_data_replicas(domain):
    module = Gathers()
    errors = expected_errors(module)
    training.trainer(domain, limit_val_batches=1).validate(module, loader(1), verbose=False)
    torch.testing.assert_close(module.gathered, errors[: len(module.gathered)])


@pytest.mark.slow
@pytest.mark.spmd(4)
@ON_MESHES
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


def test_samples_per_second_of_a_run_that_is_resumed_inside_of_an_epoch():
    """Lightning begins no epoch there, as after Ctrl-C."""
    logged = []
    module = SimpleNamespace(log=lambda name, value, **_: logged.append(value))
    trainer = SimpleNamespace(distributed_sampler_kwargs=None)
    callback, batch = SamplesPerSecond(), torch.zeros(2, 1)
    for _ in range(2):
        callback.on_train_batch_start(trainer, module, batch, 7)
        callback.on_train_batch_end(trainer, module, None, batch, 7)
    assert len(logged) == 2
    assert min(logged) > 0


class CountsDevices(LightningModule):
    """Works out the length of its schedule from the devices, as if each read its own samples."""

    def __init__(self):
        super().__init__()
        self.net, self.counts = torch.nn.Conv2d(1, 1, 3, padding=1), []

    def training_step(self, batch, batch_idx):
        self.note()
        return self.net(batch).square().mean()

    def note(self):
        t = self.trainer
        self.counts.append((t.world_size, t.num_devices, t.num_nodes, len(t.device_ids)))

    on_fit_start = on_train_end = note

    def setup(self, stage):
        self.note()

    def configure_optimizers(self):
        self.note()
        self.counts.append((dist.get_world_size(), dist.get_rank()))
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(1,), (2,), (4,)], ids=["4x1", "2x2", "1x4"])
def test_programs_that_count_devices_count_replicas(domain):
    module, runner = CountsDevices(), training.trainer(domain, max_steps=1)
    runner.fit(module, DataLoader(torch.randn(8, 1, 8, 8), 1))
    replicas = 4 // domain[0]
    of_torch = (replicas, dist.get_rank() // domain[0])
    assert of_torch in module.counts
    module.counts.remove(of_torch)
    assert set(module.counts) == {(replicas, replicas, 1, replicas)}
    assert runner.strategy.world_size == 4
