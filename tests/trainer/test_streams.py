"""What the ranks read: streams of uneven length, equal samples in a domain, equal augmentations."""

import multiprocessing
import os
import random
import time
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lightning_shard import launch, process_info
from lightning_shard.data.same_batch import check_same_batch
from tests import training
from tests.pairs import choose
from tests.parity import mesh_of
from tests.trainer.featured import Featured, loader, sample
from tests.trainer.test_fabric_loops import fabric_with


class Stream(IterableDataset):
    """`lengths[rank]` samples, of which a rank does not know how many others have."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        return map(sample, range(self.lengths[dist.get_rank()]))


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("lengths", "stage"), choose([(5, 8), (8, 3), (4, 4)], ["fit", "validate"]), ids=str
)
def test_streams_end_together(stage, lengths):
    module, steps = Featured(), []
    step = {"fit": "training_step", "validate": "validation_step"}[stage]
    run = getattr(module, step)

    def counted(batch, batch_idx):
        steps.append(batch_idx)
        return run(batch, batch_idx)

    counted.__wrapped__ = run  # Lightning looks there for the arguments of a step
    setattr(module, step, counted)
    runner = training.trainer((1,), max_epochs=2)
    getattr(runner, stage)(module, DataLoader(Stream(lengths), 2))
    batches = [-(-n // 2) for n in lengths]
    if stage == "fit":  # with the shortest
        assert steps == list(range(min(batches))) * 2
    else:  # each rank runs the steps that it has batches for
        assert steps == list(range(batches[dist.get_rank()]))


@pytest.mark.spmd(2)
def test_predictions_are_made_for_all_of_a_stream():
    module, stream = Featured(), DataLoader(Stream((5, 8)), 2)
    runner = training.trainer((1,))
    runner.fit(module, stream)
    assert len(runner.predict(module, stream)) == (3, 4)[dist.get_rank()]


class Uneven(Dataset):
    """Longer on the second process; `dist.get_rank()` would count replicas here."""

    def __len__(self):
        return 4 + 4 * process_info().rank

    def __getitem__(self, index):
        return sample(index)


REMEDIES = {  # of loaders with other numbers of batches: without and with what the error says
    "samples": lambda mended: DataLoader(Subset(Uneven(), range(4)) if mended else Uneven(), 2),
    "batch_size": lambda mended: loader(2 if mended else (12, 6)[dist.get_rank()]),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("of", REMEDIES)
def test_known_lengths_that_differ_are_refused_with_a_way_out(of):
    runner = training.trainer((1,), use_distributed_sampler=False)
    with pytest.raises(ValueError, match=rf"different numbers of batches, \[2, 4\].* {of}"):
        runner.fit(Featured(), REMEDIES[of](False))
    module, runner = Featured(), training.trainer((1,), use_distributed_sampler=False)
    runner.fit(module, REMEDIES[of](True))
    assert runner.global_step == len(REMEDIES[of](True))


@pytest.mark.spmd(2)
def test_known_lengths_that_differ_in_a_domain_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 4\], but ranks of one domain read the same"):
        training.trainer((2,)).validate(Featured(), DataLoader(Uneven(), 2))


class OtherSamples(Dataset):
    """As a dataset that chooses by the number of the process."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return sample(index + 8 * process_info().rank)


@pytest.mark.spmd(2)
def test_a_domain_that_reads_different_samples_is_refused():
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] share each sample.*entry \['x'\]"):
        training.trainer((2,)).fit(Featured(), DataLoader(OtherSamples(), 2))


class OtherOrder(Dataset):
    """The ranks of a domain agree on the first batch, and then read in another order."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return sample(index if index < 2 or process_info().rank == 0 else 9 - index)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_domain_that_reads_in_another_order_is_refused(stage):
    words = "rank 1 has read other batches than rank 0, with which it shares its samples"
    with pytest.raises(ValueError, match=words):
        getattr(training.trainer((2,)), stage)(Featured(), DataLoader(OtherOrder(), 2))


@pytest.mark.spmd(2)
def test_a_loop_of_fabric_that_reads_in_another_order_is_refused():
    with pytest.raises(ValueError, match="rank 1 has read other batches than rank 0"):
        for _ in fabric_with(domain_parallel_size=2).setup_dataloaders(DataLoader(OtherOrder(), 2)):
            pass


class SharedOut(IterableDataset):
    """Gives each process a part, as a dataset of litdata does, of which another may hold several.

    It counts processes by the launcher's variable, and asks torch for its own number.
    """

    def __init__(self, samples, *, several=False):
        self._datasets = [SharedOut(samples[:8]), SharedOut(samples[8:])] if several else []
        self.samples = samples
        self.distributed_env = SimpleNamespace(
            world_size=int(os.environ["WORLD_SIZE"]), global_rank=dist.get_rank(), num_nodes=1
        )

    def __iter__(self):
        env = self.distributed_env
        own = self.samples[env.global_rank :: env.world_size]
        return chain(*self._datasets) if self._datasets else map(sample, own)


class ReadsShared(Featured):
    def __init__(self, several):
        super().__init__()
        self.several, self.read = several, []

    def train_dataloader(self):
        return DataLoader(SharedOut(range(12), several=self.several), 1)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.read.append(float(batch["x"].sum()))
        return batch


@pytest.mark.spmd(4)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("domain", [(1,), (2,), (4,)], ids=["4x1", "2x2", "1x4"])
def test_a_dataset_that_counts_processes_counts_replicas(domain, several):
    """All ranks of a domain had read the part of one process, and nobody the rest, in silence."""
    module = ReadsShared(several)
    runner = training.trainer(domain)
    runner.fit(module)
    replicas = dist.get_world_size() // domain[0]
    replica = dist.get_rank() // domain[0]
    assert len(module.read) == 12 // replicas
    parts = [range(8), range(8, 12)] if several else [range(12)]
    own = [i for part in parts for i in part[replica::replicas]]
    assert module.read == [float(sample(i)["x"].sum()) for i in own]


class NamesAlike(Stream):
    """Has what it likes under the names that datasets of litdata use."""

    def __init__(self):
        super().__init__([2, 2])
        self.distributed_env, self._datasets = "cluster", iter(["a", "b"])


@pytest.mark.spmd(2)
def test_a_dataset_with_other_things_under_these_names():
    stream = NamesAlike()
    runner = training.trainer((2,))
    runner.fit(Featured(), DataLoader(stream, 1))
    assert runner.global_step == 2
    assert (stream.distributed_env, list(stream._datasets)) == ("cluster", ["a", "b"])


@pytest.mark.spmd(2)
def test_a_dataset_that_counts_processes_in_a_loop_of_fabric():
    fabric = fabric_with(domain_parallel_size=2)
    given = fabric.setup_dataloaders(DataLoader(SharedOut(range(4)), 1))
    assert len(list(given)) == 4


class SlowOnOneRank(Dataset):
    """One worker of the second process is slow."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if process_info().rank == 1 and index in (2, 3):
            time.sleep(1)
        return sample(index)


def read_with_workers(of):
    """The losses of steps; a worker that is ready would hand out its batch before others."""
    stream, losses = DataLoader(SlowOnOneRank(), 2, num_workers=2, in_order=False), []
    if of == "fabric":
        fabric = fabric_with(domain_parallel_size=2)
        losses += [float(b["x"].square().sum()) for b in fabric.setup_dataloaders(stream)]
    else:
        module = Featured()
        module.on_train_batch_start = lambda batch, _: losses.append(
            float(batch["x"].square().sum())
        )
        training.trainer((2,), limit_val_batches=0).fit(module, stream, loader(2))
        assert not stream.in_order  # as the user made it
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("of", ["trainer", "fabric"])
def test_workers_that_hand_out_what_is_ready(of):
    batches = torch.utils.data.default_collate([sample(i) for i in range(12)])["x"].split(2)
    expected = pytest.approx([float(x.square().sum()) for x in batches], rel=1e-9)
    assert launch(read_with_workers, of, processes=2) == [expected, expected]


@pytest.mark.spmd(4)
def test_samples_are_compared_along_each_axis_of_the_domain():
    mesh = mesh_of(2, 2)
    batch = [torch.ones(2, 2, dtype=torch.complex64), {"label": torch.tensor(3), "name": "a"}]
    check_same_batch(batch, mesh)
    batch[1]["label"] += dist.get_rank() % 2
    with pytest.raises(ValueError, match=r"entry \[1\]\['label'\]"):
        check_same_batch(batch, mesh)


@pytest.mark.spmd(2)
def test_a_batch_that_is_a_tensor_has_a_name():
    with pytest.raises(ValueError, match=r"read different batches \(the tensor itself\)"):
        check_same_batch(torch.tensor(dist.get_rank()), mesh_of(2))


class Augmented(Dataset):
    """Noise from each generator that people use; scipy draws from numpy's."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        noise = random.random() + scipy.stats.norm.rvs() + torch.rand(()).item()
        return {key: value + noise for key, value in sample(index).items()}


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_augmentations_are_equal_in_a_domain(workers):
    """Whatever each rank has seeded; the check of the first batch would raise."""
    # the ranks of the pool are daemons, which may have no children such as workers
    multiprocessing.current_process()._config["daemon"] = False
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(dist.get_rank())
    seen = []
    module = Featured()
    run = module.training_step

    def training_step(batch, batch_idx):  # Lightning looks for this name
        seen.append(batch["x"].sum())
        return run(batch, batch_idx)

    module.training_step = training_step
    loader = DataLoader(Augmented(), 2, num_workers=workers)
    training.trainer((2,), max_epochs=2).fit(module, loader)
    everywhere = [torch.empty(len(seen), dtype=torch.float64) for _ in range(2)]
    dist.all_gather(everywhere, torch.stack(seen))
    assert torch.equal(*everywhere)
    assert len(set(everywhere[0].tolist())) == len(seen), "each batch its own noise"
