"""Evaluation counts each sample once: metrics of one process, however many replicas there are."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.distributed import device_mesh, distributed_c10d
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SubsetRandomSampler
from torchmetrics import MaxMetric, Metric
from torchmetrics.regression import MeanSquaredError
from torchmetrics.utilities import dim_zero_cat

from lightning_shard import RepeatSamples
from lightning_shard.domain import subdomain
from lightning_shard.processes import mesh, replica_world
from lightning_shard.trainer.callbacks.predictions import predictions_in_order
from lightning_shard.trainer.partial_step import AbsentRanksError
from tests import training
from tests.pairs import choose
from tests.trainer.featured import QUIET
from tests.training import generator

SAMPLES = 13


def sample(index):
    x = torch.randn(1, 6, 5, generator=generator(index), dtype=torch.float64)
    return {"x": x, "index": torch.tensor(index)}


class Numbered(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return sample(index)


class Median(Metric):
    """A metric with a list for a state."""

    def __init__(self):
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values):
        self.values.append(values)

    def compute(self):
        return dim_zero_cat(self.values).median()


class Evaluated(LightningModule):
    """Logs a mean, a sum, an extreme and metrics, and remembers the samples that it has seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 3, padding=1)]
        self.network = nn.Sequential(*layers).double()
        self.bias = nn.Parameter(torch.full((3,), 0.1, dtype=torch.float64))
        self.squares = MeanSquaredError().set_dtype(torch.float64)
        self.median = Median()
        self.seen = []

    def training_step(self, batch, index):
        return self.network(batch["x"]).square().mean()

    def evaluate(self, batch, loader):
        output = self.network(batch["x"]) + self.bias.sum()
        errors = output.square().mean((1, 2, 3))
        self.seen += [(loader, int(i)) for i in batch["index"]]
        options = {"sync_dist": True, "batch_size": len(errors)}
        self.log("mean", errors.mean(), **options)
        self.log("sum", errors.sum(), reduce_fx="sum", **options)
        self.log("max", errors.max(), reduce_fx="max", **options)
        self.log("each", errors.mean(), on_step=True, **options)
        self.squares(errors, batch["index"].double())
        self.log("squares", self.squares, metric_attribute="squares")
        self.median.update(errors)
        self.log("median", self.median, metric_attribute="median")

    def validation_step(self, batch, index, dataloader_idx=0):
        self.evaluate(batch, dataloader_idx)

    def test_step(self, batch, index, dataloader_idx=0):
        self.evaluate(batch, dataloader_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def alone(stage, loaders, module=None, **options):
    """Metrics of Lightning in one process."""
    runner = Trainer(devices=1, plugins=LightningEnvironment(), **(QUIET | options))
    return getattr(runner, stage)(module or Evaluated(), loaders, verbose=False)


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-12), name


def seen_by_all(module, runner):
    """What the replicas have read, once for each domain."""
    everywhere = [None] * dist.get_world_size()
    mine = module.seen if runner.strategy.domain_rank == 0 else []
    dist.all_gather_object(everywhere, mine)
    return sorted(x for each in everywhere for x in each)


def compare(
    *, batch_size, stage="test", samples=(SAMPLES,), domain=(1,), strategy=None, make=None, **limits
):
    """Compare with one process that reads as many samples in a step as all replicas together."""

    def loaders(size):
        found = [(make or DataLoader)(Numbered(n), size) for n in samples]
        return found if len(found) > 1 else found[0]

    module = Evaluated()
    runner = training.trainer(domain, strategy=strategy, **limits)
    found = getattr(runner, stage)(module, loaders(batch_size), verbose=False)
    replicas = dist.get_world_size() // runner.strategy.domain_size
    make = None if make in READ_ALL else make
    assert_equal(found, alone(stage, loaders(batch_size * replicas), **limits))
    if not limits and make is None:
        expected = [(loader, i) for loader, n in enumerate(samples) for i in range(n)]
        assert seen_by_all(module, runner) == expected


def shuffled(data, size):
    return DataLoader(data, size, shuffle=True)


def distributed(data, size):
    return DataLoader(data, size, sampler=DistributedSampler(data, shuffle=True))


def permuted(data, size):
    torch.rand(dist.get_rank())  # replicas have drawn other numbers before
    own = torch.Generator().manual_seed(dist.get_rank()) if len(data) % 2 else None
    return DataLoader(data, size, sampler=SubsetRandomSampler(range(len(data)), own))


def whole_batches(data, size):
    return DataLoader(data, size, drop_last=True)


class Whole(Numbered):
    """A dataset of batches."""

    def __getitem__(self, index):
        return {name: value[None] for name, value in sample(index).items()}


def made_by_the_dataset(data, size, **options):
    return DataLoader(Whole(len(data)), batch_size=None, **options)


def made_by_the_dataset_and_shuffled(data, size):
    return made_by_the_dataset(data, size, shuffle=True)


READ_ALL = (
    shuffled, distributed, permuted, made_by_the_dataset, made_by_the_dataset_and_shuffled,
)  # fmt: skip
SIZES = {f"batches of {n}": {"batch_size": n} for n in range(1, 6)}


@pytest.mark.slow
def test_two_replicas(run_each):
    validated = {f"{k}, validate": v | {"stage": "validate"} for k, v in some(SIZES, 1, 4).items()}
    others = {
        "limit of 2": {"batch_size": 3, "limit_test_batches": 2},
        "limit of a half": {"batch_size": 2, "limit_test_batches": 0.5},
        "limit of validation": {"batch_size": 1, "stage": "validate", "limit_val_batches": 7},
        "shuffled": {"batch_size": 3, "make": shuffled},
        "a sampler of the user's": {"batch_size": 2, "make": distributed},
        "whole batches": {"batch_size": 3, "make": whole_batches},
        "whole batches of some": {"batch_size": 1, "make": whole_batches},
        "several loaders": {"batch_size": 2, "samples": (5, 1, 13)},
        "gradients": {"batch_size": 3, "strategy": {"sharding": "gradients"}},
        "none": {"batch_size": 3, "strategy": {"sharding": "none"}},
    }
    run_each(2, compare, SIZES | validated | others)


SPLIT = {f"{k}, 2x2": v | {"domain": (2,)} for k, v in SIZES.items()}


@pytest.mark.slow
def test_each_size(run_each):
    run_each(3, compare, SIZES)
    run_each(4, compare, SIZES | SPLIT)


def some(cases, *sizes):
    return {name: case for name, case in cases.items() if case["batch_size"] in sizes}


FEWER = {"fewer samples": {"batch_size": 1, "samples": (2,)}}
DRAWN = {"a sampler that draws": {"batch_size": 2, "samples": (13, 6), "make": permuted}}


def test_three_replicas(run_each):
    """The other cases are slow."""
    run_each(3, compare, FEWER | DRAWN)


@pytest.mark.slow
def test_each_case_on_three_replicas(run_each):
    others = {
        "batches of a dataset": {"batch_size": 1, "samples": (13, 2), "make": made_by_the_dataset},
        "such batches, shuffled": {"batch_size": 1, "make": made_by_the_dataset_and_shuffled},
    }
    run_each(3, compare, some(SIZES, 1, 2) | FEWER | DRAWN | others)


@pytest.mark.slow
def test_four_replicas(run_each):
    others = {
        "several loaders": {"batch_size": 1, "samples": (2, 13, 1)},
        "several loaders, 2x2": {"batch_size": 1, "samples": (1, 13), "domain": (2,)},
        "limits": {"batch_size": 1, "samples": (13, 6), "limit_test_batches": 3},
        "hybrid": {"batch_size": 3, "strategy": {"sharding": "hybrid"}},
    }
    run_each(4, compare, some(SIZES, 3, 5) | some(SPLIT, 2, 4) | others)


class Stream(IterableDataset):
    """Sample i for replica i modulo their number; a rank does not know how many others have."""

    def __init__(self, samples, replica, replicas):
        self.indices = range(replica, samples, replicas)

    def __iter__(self):
        return map(sample, self.indices)


@pytest.mark.quick_rows("1")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("samples", [1, 6, 13])
def test_streams(samples):
    module, runner = Evaluated(), training.trainer((1,))
    loader = DataLoader(Stream(samples, dist.get_rank(), 2), 2)
    found = runner.test(module, [loader, DataLoader(Numbered(3), 1)], verbose=False)
    whole = [DataLoader(Stream(samples, 0, 1), 2), DataLoader(Numbered(3), 2)]
    # the numbers of a step are those of other samples
    assert_equal(found, alone("test", whole))


@pytest.mark.spmd(2)
def test_validation_within_fit():
    module = Evaluated()
    runner = training.trainer((1,), max_epochs=2)
    runner.fit(module, DataLoader(Numbered(4), 2), DataLoader(Numbered(5), 2))
    assert seen_by_all(module, runner) == [(0, i) for i in range(5) for _ in range(3)]


@pytest.mark.spmd(2)
def test_validation_of_one_sample_within_fit():
    """The sanity check has logged before, and one replica logs nothing each time."""

    def metrics_of(runner, size):
        runner.fit(Evaluated(), DataLoader(Numbered(4), size), DataLoader(Numbered(1), 1))
        return {name: float(value) for name, value in runner.callback_metrics.items()}

    one = Trainer(devices=1, plugins=LightningEnvironment(), **(QUIET | {"max_epochs": 2}))
    assert_equal([metrics_of(training.trainer((1,), max_epochs=2), 2)], [metrics_of(one, 4)])


@pytest.mark.spmd(2)
@pytest.mark.parametrize(("limit", "given"), choose([1.0, 0.5], [DataLoader, distributed]))
def test_predictions(given, limit):
    class Predicts(Evaluated):
        def predict_step(self, batch, index):
            return batch["index"]

    runner = training.trainer((1,), limit_predict_batches=limit)
    found = runner.predict(Predicts(), given(Numbered(SAMPLES), 2))
    ordered = [int(x) for x in predictions_in_order(runner, found)]
    if given is DataLoader or limit == 1.0:
        assert ordered == list(range(SAMPLES if limit == 1.0 else 8))
    else:
        assert len(set(ordered)) == len(ordered) == 8


class Predicts(Evaluated):
    def predict_step(self, batch, index):
        self.seen += [(0, int(i)) for i in batch["index"]]
        return self.network(batch["x"])


@pytest.mark.spmd(2)
@pytest.mark.parametrize("make", [made_by_the_dataset, made_by_the_dataset_and_shuffled])
def test_batches_of_a_dataset_are_predicted_once(make):
    torch.rand(dist.get_rank())  # replicas would draw other orders
    runner, module = training.trainer((1,)), Predicts()
    found = runner.predict(module, make(Numbered(5), 1))
    assert seen_by_all(module, runner) == [(0, i) for i in range(5)]
    with pytest.raises(ValueError, match=r"batch_size=None.*give it a batch size"):
        predictions_in_order(runner, found)


def check_predictions(*, domain=(1,)):
    runner = training.trainer(domain)
    found = predictions_in_order(
        runner, runner.predict(Predicts(), DataLoader(Numbered(SAMPLES), 2))
    )
    alone = Trainer(devices=1, plugins=LightningEnvironment(), **QUIET)
    batches = alone.predict(Predicts(), DataLoader(Numbered(SAMPLES), 4))
    wanted = torch.cat([torch.as_tensor(batch) for batch in batches or ()])
    torch.testing.assert_close(torch.stack(found), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_values_of_predictions(run_each):
    for ranks, domain in ((2, (1,)), (3, (1,)), (4, (1,)), (4, (2,))):
        run_each(ranks, check_predictions, {f"{ranks} ranks, domain {domain}": {"domain": domain}})


class Communicates(Evaluated):
    def test_step(self, batch, index):
        super().test_step(batch, index)
        self.all_gather(batch["index"].sum())


class SyncsEachStep(Evaluated):
    def __init__(self):
        super().__init__()
        self.squares = MeanSquaredError(dist_sync_on_step=True).set_dtype(torch.float64)


class CallsTorch(Evaluated):
    def test_step(self, batch, index):
        super().test_step(batch, index)
        dist.all_reduce(torch.ones(()))


@pytest.mark.parametrize("module", [Communicates, SyncsEachStep, CallsTorch])
@pytest.mark.spmd(2)
def test_a_step_that_communicates_is_refused(module):
    with pytest.raises(AbsentRanksError, match=r"ranks \[1\], which have no samples left"):
        training.trainer((1,)).test(module(), DataLoader(Numbered(3), 1), verbose=False)


class CommunicatesAtTheEnd(Evaluated):
    def on_test_epoch_end(self):
        self.total = self.all_gather(torch.tensor(len(self.seen))).sum()


@pytest.mark.spmd(2)
def test_communication_after_the_steps():
    """The other way out that the error names."""
    module = CommunicatesAtTheEnd()
    training.trainer((1,)).test(module, DataLoader(Numbered(3), 1), verbose=False)
    assert module.total == 3


@pytest.mark.parametrize("module", [Communicates, SyncsEachStep, CallsTorch])
@pytest.mark.spmd(2)
def test_samples_can_be_repeated(module):
    """The way out that the error names."""
    model, runner = module(), training.trainer((1,), callbacks=[RepeatSamples()])
    runner.test(model, DataLoader(Numbered(3), 1), verbose=False)
    assert seen_by_all(model, runner) == [(0, 0), (0, 0), (0, 1), (0, 2)]


class TakesIterator(Evaluated):
    def test_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        super().test_step(batch, 0)


class TakesSeveral(Evaluated):
    def test_step(self, batch, index):
        for each in batch:
            super().test_step(each, index)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("module", [TakesIterator, TakesSeveral])
def test_steps_of_several_batches_repeat_samples(module):
    loader = DataLoader(Numbered(3), 1)
    if module is TakesSeveral:
        loader = CombinedLoader([loader], "max_size")
    model, runner = module(), training.trainer((1,))
    runner.test(model, loader, verbose=False)
    assert seen_by_all(model, runner) == [(0, 0), (0, 0), (0, 1), (0, 2)]


class LogsLate(Evaluated):
    """Logs some values in the second step only, which the second of two replicas does not run."""

    def test_step(self, batch, index):
        if index == 1:
            super().test_step(batch, index)


@pytest.mark.spmd(2)
def test_names_that_only_some_replicas_log():
    found = training.trainer((1,)).test(LogsLate(), DataLoader(Numbered(3), 1), verbose=False)
    assert_equal(found, alone("test", DataLoader(Numbered(3), 2), LogsLate()))


class MakesNoGroup(Evaluated):
    """Its steps make no process group: all ranks make one together, and some may have no batch."""

    def on_test_start(self):
        self.patches = contextlib.ExitStack()
        for module in (distributed_c10d, dist, device_mesh):
            refused = AssertionError("a step makes a group")
            self.patches.enter_context(mock.patch.object(module, "new_group", side_effect=refused))

    def on_test_end(self):
        self.patches.close()


@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(2,), (1, 2)])
def test_groups_are_made_before_the_first_step(domain):
    made = [mesh._made, mesh._sub_mesh, mesh._flat_mesh, mesh._parameter_mesh]
    for cached in (*made, replica_world._replicas_of, subdomain._domain_of):
        cached.cache_clear()  # of earlier tests
    runner = training.trainer(domain)
    assert runner.test(MakesNoGroup(), DataLoader(Numbered(4), 1), verbose=False)


class KeepsMaps(LightningModule):
    """A metric that keeps fields."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.median = Median()

    def test_step(self, batch, index):
        self.median.update(batch["x"] * self.weight.sum())
        self.log("median", self.median, metric_attribute="median")


@pytest.mark.spmd(4)
@pytest.mark.parametrize("repeat", [False, True])
def test_a_replica_without_samples_of_a_metric_that_keeps_fields(repeat):
    runner = training.trainer((2,), callbacks=[RepeatSamples()] if repeat else [])
    loader = DataLoader(Numbered(1), 1)
    if repeat:
        assert runner.test(KeepsMaps(), loader, verbose=False)
    else:
        with pytest.raises(NotImplementedError, match=r"'median' keeps split tensors in 'values'"):
            runner.test(KeepsMaps(), loader, verbose=False)


class KeepsLargest(LightningModule):
    """The state of MaxMetric is float64 from the second sample on.

    Lightning moves the metric to the device as a step logs it, and torchmetrics then takes the
    default dtype, which `64-true` sets within a step.
    """

    def __init__(self):
        super().__init__()
        self.largest = MaxMetric()
        self.weight = nn.Parameter(torch.ones(()))

    def test_step(self, batch, index, dataloader_idx=0):
        self.largest.update(batch["x"].square().mean() * self.weight)
        self.log("largest", self.largest)


@pytest.mark.spmd(4)
@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize("samples", [1, 3, 6])
@pytest.mark.parametrize("domain", [(1,), (2,)], ids=["4x1", "2x2"])
def test_replicas_whose_metrics_have_other_dtypes(loaders, samples, domain):
    """They had gathered numbers of both dtypes, which gloo ended by an abort."""
    given = [DataLoader(Numbered(samples), 1) for _ in range(loaders)]
    runner = training.trainer(domain, precision="64-true")
    found = runner.test(KeepsLargest(), given, verbose=False)
    wanted = alone("test", given, KeepsLargest(), precision="64-true")
    for mine, plain in zip(found, wanted, strict=True):
        assert mine == pytest.approx(plain, rel=1e-6)


class GathersAll(LightningModule):
    """Gathers one number of each sample as the epoch ends, as for a plot of all errors."""

    def __init__(self):
        super().__init__()
        self.errors = []

    def validation_step(self, batch, index):
        self.errors.append(batch["x"].square().mean((1, 2, 3)))

    def on_validation_epoch_end(self):
        self.found = self.all_gather(torch.cat(self.errors))


@pytest.mark.spmd(2)
def test_gathering_of_uneven_results_is_refused():
    """It read foreign memory on one rank, and ended the process of the other."""
    loader = DataLoader(Numbered(5), 1)
    with pytest.raises(ValueError, match=r"differ: \(3,\).*; \(2,\) .*RepeatSamples"):
        training.trainer((1,)).validate(GathersAll(), loader, verbose=False)
    module = GathersAll()
    runner = training.trainer((1,), callbacks=[RepeatSamples()])  # as the sentence says
    runner.validate(module, loader, verbose=False)
    assert module.found.shape == (2, 3)
