"""Which samples and which seeds the ranks get."""

import functools
import os
import signal
import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)

from lightning_shard import RepeatSamples
from lightning_shard.trainer.sample_order import SampleOrder
from tests import training
from tests.pairs import choose
from tests.trainer.featured import QUIET


def given(loader, *, replicas, replica, stage=TrainerFn.VALIDATING, repeat=False):
    """What the ranks of a replica read, where no process group is needed."""
    order, asked = SampleOrder(), SimpleNamespace(use_distributed_sampler=True)
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn=stage),
        training=False,
        callbacks=[RepeatSamples()] if repeat else [],
        _accelerator_connector=asked,
    )
    place = {"replicas": replicas, "replica": replica, "device": torch.device("cpu")}
    with mock.patch("lightning_shard.trainer.sample_order.share_seeded_state"):
        order.begin_stage(trainer, None, **place)
    found = order.prepare(loader, lambda _: None, lambda _: None, late=False)
    return found, order, asked.use_distributed_sampler


def test_workers_are_seeded_by_the_replica():
    loader = DataLoader([1, 2, 3, 4])
    found, order, _ = given(loader, replicas=2, replica=1)
    assert isinstance(found.worker_init_fn, functools.partial)
    assert found.worker_init_fn.keywords == {"rank": 1}
    order.end_stage()
    assert found.worker_init_fn is None


@pytest.mark.parametrize("seeded", ["0", "1"])
def test_workers_of_one_replica_are_seeded_as_lightning_seeds_them(seeded):
    with mock.patch.dict(os.environ, {"PL_SEED_WORKERS": seeded}):
        found, _, _ = given(DataLoader([1, 2]), replicas=1, replica=0)
    rank_0 = {"rank": 0} if seeded == "1" else None
    assert getattr(found.worker_init_fn, "keywords", None) == rank_0


def test_a_users_seeding_of_workers_stays():
    def seed(worker):
        return worker

    found, _, _ = given(DataLoader([1, 2], worker_init_fn=seed), replicas=2, replica=1)
    assert found.worker_init_fn is seed


@pytest.mark.parametrize(
    ("seed", "start"), [(None, "fork"), (int, "fork"), (int, "forkserver")], ids=str
)
def test_workers_of_a_training_outlive_signals(seed, start):
    plain = DataLoader(range(8), num_workers=1, worker_init_fn=seed, multiprocessing_context=start)
    loader, order, _ = given(plain, replicas=1, replica=0, stage=TrainerFn.FITTING)
    batches = iter(loader)
    (worker,) = batches._workers
    assert next(batches) == 0
    for number in ("INT", "TERM"):  # of another process
        subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)
    assert [int(next(batches)) for _ in range(6)] == [*range(1, 7)]
    os.kill(worker.pid, signal.SIGTERM)  # of its rank
    worker.join(10)
    assert worker.exitcode == 0
    order.end_stage()
    assert plain.worker_init_fn is seed


def test_evaluation_says_what_is_counted_twice():
    with pytest.warns(UserWarning, match="5 samples are evaluated on 2 data replicas, so some"):
        found, _, _ = given(DataLoader([1, 2, 3, 4, 5]), replicas=2, replica=1, repeat=True)
    assert [int(x) for x in found] == [2, 4, 1]


@pytest.mark.spmd(2)
@pytest.mark.parametrize("stage", [TrainerFn.FITTING, TrainerFn.TESTING])
def test_a_sampler_that_counts_all_ranks_counts_replicas(stage):
    own = DistributedSampler(range(5), shuffle=False)
    own.set_epoch(3)
    found, _, _ = given(DataLoader(range(5), 2, sampler=own), replicas=1, replica=0, stage=stage)
    assert [batch.tolist() for batch in found] == [[0, 1], [2, 3], [4]]
    assert len(found) == 3
    assert own.epoch == 3
    other = DistributedSampler(range(5), num_replicas=3, rank=1, shuffle=False)
    found, _, _ = given(DataLoader(range(5), sampler=other), replicas=1, replica=0, stage=stage)
    assert [int(x) for x in found] == [1, 4]


@pytest.mark.parametrize(("whole", "read"), [(False, [[1, 4], [2], [3]]), (True, [[1], [2], [3]])])
def test_evaluation_reads_each_sample_once(whole, read):
    loader = DataLoader([1, 2, 3, 4], drop_last=whole)
    for replica, expected in enumerate(read):
        found, order, _ = given(loader, replicas=3, replica=replica)
        assert [int(x) for x in found] == expected
        order.end_stage()


@pytest.mark.parametrize("stage", [TrainerFn.FITTING, TrainerFn.PREDICTING])
def test_lightning_gives_samplers_for_predictions_alone(stage):
    *_, injects = given(DataLoader([1, 2]), replicas=2, replica=0, stage=stage)
    assert injects is (stage == TrainerFn.PREDICTING)


class Reads(LightningModule):
    """Notes the numbers of the samples that each step reads, of two loaders."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append({name: numbers.tolist() for name, numbers in batch.items()})
        return self.weight.square()

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def two_loaders(size, mode, seed):
    numbers = {"a": range(8), "b": range(100, 104)}
    own = [None if seed is None else torch.Generator().manual_seed(seed + i) for i in range(2)]
    loaders = {
        name: DataLoader(samples, size, shuffle=True, generator=generator)
        for (name, samples), generator in zip(numbers.items(), own, strict=True)
    }
    return CombinedLoader(loaders, mode)


@pytest.mark.quick_rows(
    "one fit-max_size_cycle-torch's numbers",
    "loaders asked for in each epoch-min_size-numbers of each loader",
    "in each second-max_size_cycle-torch's numbers",
    "two fits-min_size-torch's numbers",
    "validations-max_size_cycle-numbers of each loader",
)
@pytest.mark.spmd(2)
@pytest.mark.parametrize("seed", [None, 11], ids=["torch's numbers", "numbers of each loader"])
@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
@pytest.mark.parametrize(
    ("fits", "options"),
    [
        ((3,), {}),
        ((3,), {"reload_dataloaders_every_n_epochs": 1}),
        ((4,), {"reload_dataloaders_every_n_epochs": 2}),
        ((1, 3), {}),
        ((3,), {"val_check_interval": 1}),
    ],
    ids=["one fit", "loaders asked for in each epoch", "in each second", "two fits", "validations"],
)
def test_two_loaders_that_shuffle_draw_as_in_one_process(mode, seed, fits, options):
    """Each its own order, in each epoch and in each pass of the shorter one.

    In an epoch that is not the first, Lightning begins loaders once more if it asked for them. The
    loader of a validation draws, too, and then perhaps begins another pass of the shorter one.
    """
    torch.manual_seed(5)
    alone, module = Reads(), Reads()
    start = torch.get_rng_state()
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0, **options}
    if "val_check_interval" in options:
        options["limit_val_batches"] = 1
    plain = Trainer(devices=1, plugins=LightningEnvironment(), **QUIET, **options)
    fit_each(plain, fits, alone, two_loaders(4, mode, seed))
    torch.set_rng_state(start)
    torch.rand(dist.get_rank())  # replicas have drawn other numbers meanwhile
    fit_each(training.trainer((1,), **options), fits, module, two_loaders(2, mode, seed))
    found = [None, None]
    dist.all_gather_object(found, module.seen)
    for wanted, *each in zip(alone.seen, *found, strict=True):
        for name, numbers in wanted.items():
            together = [
                n for pair in zip(*(mine[name] for mine in each), strict=True) for n in pair
            ]
            assert together == numbers
    assert len({tuple(step["a"]) for step in alone.seen}) > 2


def fit_each(runner, epochs, module, loaders):
    for last in epochs:
        runner.fit_loop.max_epochs = last
        runner.fit(module, loaders, DataLoader(range(8), 2, shuffle=True))


@pytest.mark.spmd(2)
def test_a_combined_loader_is_read_whole_where_replicas_had_read_it():
    """Lightning puts the loaders that replicas read into the user's `CombinedLoader`."""
    loader = CombinedLoader({"a": DataLoader(range(8), 2)})
    for domain, steps in (((1,), 2), ((2,), 4), ((1,), 2)):
        module = Reads()
        training.trainer(domain).fit(module, loader)
        assert len(module.seen) == steps
    first = [step["a"][0] for step in module.seen]
    assert first == [[0, 4], [1, 5]][dist.get_rank()]


class ReadsOne(Reads):
    def training_step(self, batch, index):
        assert batch.shape[0] == 2
        self.seen.append(batch.flatten().tolist())
        return self.weight.square()

    def test_step(self, batch, index):
        self.training_step(batch, index)


def weighted(samples):
    weights = torch.arange(1.0, samples + 1).tolist()
    return WeightedRandomSampler(weights, samples, generator=torch.Generator().manual_seed(3))


OWN_SAMPLERS = {
    "random": lambda: RandomSampler(range(8)),
    "weighted": lambda: weighted(8),
    "in reversed order": lambda: range(7, -1, -1),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("name", "stage", "made_by"),
    choose(OWN_SAMPLERS, ["fit", "test"], ["script", "module"], fast=2),
)
def test_batches_of_a_batch_sampler_are_divided(name, stage, made_by):
    """Lightning gives replicas samples in another order, and forgets to make batches of them.

    `DataLoader.sampler` is none of the user's where the loader was given a batch sampler.
    """
    torch.manual_seed(5)
    module = ReadsOne()
    runner = training.trainer((1,), max_epochs=1)

    def loader():
        return DataLoader(range(8), batch_sampler=BatchSampler(OWN_SAMPLERS[name](), 2, False))

    if made_by == "script":
        getattr(runner, stage)(module, loader())
    else:  # Lightning notes how a loader is made in this hook
        module.train_dataloader = module.test_dataloader = loader
        getattr(runner, stage)(module)
    found = [None, None]
    dist.all_gather_object(found, module.seen)
    read = [
        [n for pair in zip(*both, strict=True) for n in pair] for both in zip(*found, strict=True)
    ]
    numbers = [n for batch in read for n in batch]
    assert len(numbers) == 8
    if name == "weighted":
        assert len({*numbers}) < 8
        assert stage == "test" or numbers == list(weighted(8))
    elif name == "random":
        assert sorted(numbers) == list(range(8)) != numbers
    else:
        assert numbers == list(range(7, -1, -1))


@pytest.mark.spmd(2)
def test_a_distributed_sampler_in_a_batch_sampler_counts_replicas():
    own = DistributedSampler(range(8), shuffle=False)  # counts all ranks
    loader = DataLoader(range(8), batch_sampler=BatchSampler(own, 2, False))
    found, _, _ = given(loader, replicas=1, replica=0, stage=TrainerFn.TESTING)
    assert [batch.tolist() for batch in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]


class Pairs(BatchSampler):
    """A batch sampler of the user: the samples of a batch are neighbours in its order."""

    def __iter__(self):
        yield from torch.tensor(list(self.sampler)).split(self.batch_size)


class OwnOrder(BatchSampler):
    """A batch sampler of the user that reads no sampler."""

    def __iter__(self):
        yield from torch.arange(8).split(self.batch_size)


@pytest.mark.parametrize("replica", [0, 1])
def test_evaluation_reads_each_sample_once_by_batches_of_the_user(replica):
    loader = DataLoader(range(5), batch_sampler=Pairs(range(5), 2, False))
    found, order, _ = given(loader, replicas=2, replica=replica)
    assert [batch.tolist() for batch in found] == [[[0, 2], [4]], [[1, 3]]][replica]
    order.end_stage()


class Planned(BatchSampler):
    """A batch sampler of the user that reads its sampler as it is made."""

    def __init__(self, sampler, batch_size, drop_last):
        super().__init__(sampler, batch_size, drop_last)
        numbers = torch.tensor(list(sampler)).split(batch_size)
        self.batches = [each.tolist() for each in numbers]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


@pytest.mark.parametrize("replica", [0, 1])
def test_evaluation_reads_each_sample_once_by_batches_that_are_planned(replica):
    loader = DataLoader(range(5), batch_sampler=Planned(range(5), 2, False))
    for stage in (TrainerFn.VALIDATING, TrainerFn.TESTING):  # a `CombinedLoader` keeps it
        loader, order, _ = given(loader, replicas=2, replica=replica, stage=stage)
        assert [batch.tolist() for batch in loader] == [[[0, 2], [4]], [[1, 3]]][replica]
        order.end_stage()


class ReadsPlanned(Reads):
    """Replicas have drawn other numbers as the batches of epochs are planned."""

    def train_dataloader(self):
        torch.rand(dist.get_rank() + 1)
        batches = Planned(RandomSampler(range(8)), 2, False)
        return {"a": DataLoader(range(8), batch_sampler=batches)}


@pytest.mark.spmd(2)
def test_replicas_divide_batches_that_are_planned():
    module = ReadsPlanned()
    options = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}
    training.trainer((1,), **options).fit(module)
    everywhere = [None, None]
    dist.all_gather_object(everywhere, module.seen)
    epochs = [
        [n for seen in everywhere for step in seen[k : k + 2] for n in step["a"]] for k in (0, 2)
    ]
    assert [sorted(epoch) for epoch in epochs] == [[*range(8)]] * 2
    assert epochs[0] != epochs[1]


class LikePairs(torch.utils.data.Sampler):
    """Such a one that is no `BatchSampler`."""

    def __init__(self, sampler, batch_size, drop_last):
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self):
        yield from torch.tensor(list(self.sampler)).split(self.batch_size)


def test_evaluation_reads_each_sample_once_by_what_is_like_a_batch_sampler():
    loader = DataLoader(range(5), batch_sampler=LikePairs(range(5), 2, False))
    found, order, _ = given(loader, replicas=2, replica=1)
    assert [batch.tolist() for batch in found] == [[1, 3]]
    order.end_stage()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize(
    "several",
    [False, True],
    ids=[
        "one",
        "second",
    ],
)
def test_an_evaluation_in_which_all_replicas_read_the_same_samples(stage, several):
    loader = DataLoader(range(8), batch_sampler=OwnOrder(range(8), 2, False))
    loaders = [DataLoader(range(4), 2), loader] if several else loader
    module = ReadsOne()
    module.validation_step = module.test_step = lambda batch, index, dataloader_idx=0: None
    with pytest.raises(ValueError, match=r"OwnOrder .* same samples"):
        getattr(training.trainer((1,)), stage)(module, loaders)
    getattr(training.trainer((2,)), stage)(module, loaders)


@pytest.mark.spmd(2)
def test_a_batch_sampler_that_gives_all_replicas_the_same_samples():
    loader = DataLoader(range(8), batch_sampler=OwnOrder(range(8), 2, False))
    with pytest.raises(ValueError, match=r"OwnOrder .* same samples.*_distributed_sampler=False"):
        training.trainer((1,)).fit(ReadsOne(), loader)
    module = ReadsOne()
    training.trainer((1,), use_distributed_sampler=False).fit(module, loader)
    training.trainer((2,)).fit(module, loader)
    assert module.seen == 2 * [[0, 1], [2, 3], [4, 5], [6, 7]]
