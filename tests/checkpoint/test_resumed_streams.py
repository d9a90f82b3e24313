"""Runs that are resumed inside an epoch read on in streams, and in loaders of several lengths."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.pairs import choose
from tests.training import Fields, shared_path, trainer

BATCHES = 5


def sample(index):
    return torch.full((1, 4, 3), float(index))


class Stream(IterableDataset):
    """Ten samples, of which each replica yields its own; it knows no length."""

    def __init__(self, first=0):
        self.first = first

    def __iter__(self):
        return (sample(i) for i in self._order())

    def _order(self):
        return range(self.first, 10)


class Shuffled(Stream):
    def _order(self):
        return torch.randperm(10, generator=torch.Generator().manual_seed(torch.initial_seed()))


class ShuffledByWorkers(Stream):
    def _order(self):
        assert get_worker_info() is not None
        return torch.randperm(10)


class Counted(Stream):
    def __len__(self):
        return 10


class Batches:
    """A batch sampler that draws an order, and knows no length."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        yield from torch.randperm(10).view(-1, self.size).tolist()


def two(size, short):
    samples = {"a": Fields(sample, 10), "b": Fields(sample, short)}
    return {name: DataLoader(each, size, shuffle=True) for name, each in samples.items()}


# all read five batches in an epoch; those that are divided are told the batch size of a replica
LOADERS = {
    "stream": lambda size: DataLoader(Stream(), 2),
    "stream of batches": lambda size: DataLoader(Stream(5), None),
    "stream with a length": lambda size: DataLoader(Counted(), 2),
    "stream that shuffles": lambda size: DataLoader(Shuffled(), 2),
    "stream that shuffles in a worker": lambda size: DataLoader(
        ShuffledByWorkers(), 2, num_workers=1, multiprocessing_context="fork"
    ),
    "batches of the dataset": lambda size: DataLoader(
        Fields(sample, 5 if size == 2 else 10), None, shuffle=True
    ),
    "two loaders": lambda size: two(size, 4),
    "a loader of one batch": lambda size: two(size, 2),
}


def own_batches():
    """Lightning divides no batch sampler of another class among replicas."""
    return DataLoader(Fields(sample, 10), batch_sampler=Batches(2))


class Reads(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.seen.append([float(part.mean()) for part in parts])
        torch.rand(())  # a step draws, too
        return self.weight.square() + sum(part.mean() for part in parts) * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class SaveAfter(Callback):
    def __init__(self, batches):
        self.batches, self.path = batches, shared_path("run.ckpt")

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == self.batches:
            trainer.save_checkpoint(self.path)


class ReadsTwo(Reads):
    """Leaves out the rest of each epoch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


def fit(loaders, domain, *, save=None, path=None, kind=Reads, **options):
    seed_everything(5)
    module = kind()
    callbacks = [] if save is None else [save]
    runner = trainer(domain, callbacks=callbacks, max_epochs=3, **options)
    data = {"datamodule": loaders} if isinstance(loaders, LightningDataModule) else {}
    runner.fit(module, *([] if data else [loaders]), **data, ckpt_path=path)
    return module.seen


@pytest.mark.quick_rows(
    "stream of batches-2-(1,)",
    "stream that shuffles in a worker-5-(2,)",
    "batches of the dataset-6-(1,)",
    "two loaders-9-(2,)",
)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("name", "after", "domain"), choose(LOADERS, [1, 2, 3, 4, 5, 6, 9], [(2,), (1,)]), ids=str
)
def test_reads_on(name, after, domain):
    # the ranks of the pool are daemons, which may have no children such as workers
    multiprocessing.current_process()._config["daemon"] = False
    size = 2 * domain[0] // dist.get_world_size()
    save = SaveAfter(after)
    seen = fit(LOADERS[name](size), domain, save=save)
    assert len(seen) == 3 * BATCHES
    assert len({str(batch) for batch in seen}) > 3
    assert fit(LOADERS[name](size), domain, path=save.path) == seen[after:]


class SaveBefore(SaveAfter):
    """Saves as the first batch of an epoch begins, which has drawn its order."""

    def on_train_batch_start(self, trainer, module, *_):
        self.on_train_batch_end(trainer, module)

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.fit_loop.epoch_loop.batch_progress.current.processed == 0:
            super().on_train_batch_end(trainer, module)


@pytest.mark.quick_rows("two loaders")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", ["stream that shuffles in a worker", "two loaders"])
def test_reads_on_from_the_beginning_of_an_epoch(name):
    multiprocessing.current_process()._config["daemon"] = False
    save = SaveBefore(BATCHES)
    seen = fit(LOADERS[name](2), (2,), save=save)
    assert fit(LOADERS[name](2), (2,), path=save.path) == seen[BATCHES:]


@pytest.mark.quick_rows("3")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("after", [1, 3, 4])
def test_reads_on_where_a_hook_leaves_out_the_rest_of_epochs(after):
    save, loader = SaveAfter(after), DataLoader(Fields(sample, 10), 2, shuffle=True)
    seen = fit(loader, (2,), save=save, kind=ReadsTwo)
    assert len(seen) == 6
    assert fit(loader, (2,), path=save.path, kind=ReadsTwo) == seen[after:]


@pytest.mark.spmd(2)
def test_a_batch_sampler_without_a_length():
    save = SaveAfter(3)
    seen = fit(own_batches(), (2,), save=save)
    assert fit(own_batches(), (2,), path=save.path) == seen[3:]


@pytest.mark.spmd(2)
def test_a_stream_is_read_on_by_another_number_of_replicas():
    save = SaveAfter(7)
    seen = fit(DataLoader(Counted(), 2), (1,), save=save)
    assert fit(DataLoader(Counted(), 2), (2,), path=save.path) == seen[7:]


class KeepsItsPlace(LightningDataModule):
    """A data module that restores the place of its stream itself."""

    read = 0

    def train_dataloader(self):
        first, self.read = 2 * self.read, 0
        return DataLoader(Stream(first), 2)

    def state_dict(self):
        return {"read": self.trainer.fit_loop.epoch_loop.batch_progress.current.processed}

    def load_state_dict(self, state):
        self.read = state["read"]


@pytest.mark.spmd(2)
def test_a_stream_that_the_data_module_restores():
    save = SaveAfter(3)
    options = {"reload_dataloaders_every_n_epochs": 1}
    seen = fit(KeepsItsPlace(), (2,), save=save, **options)
    assert fit(KeepsItsPlace(), (2,), path=save.path, **options)[:2] == seen[3:5]
