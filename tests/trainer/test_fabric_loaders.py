"""Loaders of Fabric: data replicas share the samples of one process, or a sentence says why not."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from tests.trainer.test_fabric import fabric_of


class Forever(Sampler):
    """Yields the samples over and over, as some programs do that count steps."""

    def __iter__(self):
        while True:
            yield from range(8)


class SizedForever(Forever):
    def __len__(self):
        return 8


class Fixed(BatchSampler):
    def __iter__(self):
        return iter([[0, 1], [2, 3]])


def read(fabric, loader, **options):
    return [batch.tolist() for batch in fabric.setup_dataloaders(loader, **options)]


@pytest.mark.spmd(2)
@pytest.mark.parametrize("given", ["loader", "batches"])
def test_samples_that_fill_no_batch_are_dropped_as_in_one_process(given):
    fabric = fabric_of("hybrid_shard")
    data = range(11)  # of which a process that reads 4 at once drops the last 3
    loader = DataLoader(data, 2, drop_last=True)
    if given == "batches":
        loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, True))
    mine = [[0, 2], [4, 6]] if fabric.global_rank == 0 else [[1, 3], [5, 7]]
    assert read(fabric, loader) == mine


@pytest.mark.spmd(2)
def test_samples_that_are_read_twice_are_told():
    fabric = fabric_of("hybrid_shard")
    if fabric.global_rank == 0:
        with pytest.warns(UserWarning, match="drop_last=True"):
            assert read(fabric, DataLoader(range(3), 2)) == [[0, 2]]
    else:
        assert read(fabric, DataLoader(range(3), 2)) == [[1, 0]]


@pytest.mark.spmd(2)
def test_a_sampler_without_end_reads_for_its_replica_or_is_refused():
    fabric = fabric_of("hybrid_shard")
    with pytest.raises(TypeError, match=r"Forever has no length.*use_distributed_sampler=False"):
        fabric.setup_dataloaders(DataLoader(range(8), 2, sampler=Forever()))
    with pytest.raises(ValueError, match="yields more samples than its length, 8"):
        read(fabric, DataLoader(range(8), 2, sampler=SizedForever()))
    own = DataLoader(range(8), 2, sampler=Forever())
    batches = iter(fabric.setup_dataloaders(own, use_distributed_sampler=False))
    assert [next(batches).tolist() for _ in range(5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]


@pytest.mark.spmd(2)
def test_batches_that_do_not_read_their_sampler_are_refused():
    fabric = fabric_of("hybrid_shard")
    loader = DataLoader(range(4), batch_sampler=Fixed(SequentialSampler(range(4)), 2, False))
    with pytest.raises(ValueError, match="Fixed makes batches without reading its `sampler`"):
        read(fabric, loader)
    assert read(fabric, loader, use_distributed_sampler=False) == [[0, 1], [2, 3]]


@pytest.mark.spmd(2)
def test_the_mean_of_truths_stays_true():
    fabric = fabric_of("hybrid_shard")
    assert fabric.all_reduce(torch.tensor(True)).item() is True
