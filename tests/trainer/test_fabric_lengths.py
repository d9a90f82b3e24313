"""Ranks of a loop of Fabric that read other numbers of batches end soon, or need not be alike."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard import FabricShardStrategy
from tests.trainer.test_fabric import fabric_of
from tests.trainer.test_lone_ranks import ends_in_seconds, slow

LENGTHS = 4, 6


class Stream(IterableDataset):
    """Has no length before it is read."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def set_up(sharding, kind=list):
    """Set up a network, its optimizer, and a loader that has another length on each rank."""
    fabric = fabric_of(FabricShardStrategy(sharding=sharding))
    net: nn.Module = nn.Conv2d(1, 1, 3, padding=1)
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    samples = kind([torch.ones(1, 5, 5)] * LENGTHS[fabric.global_rank])
    loader = fabric.setup_dataloaders(DataLoader(samples), use_distributed_sampler=False)

    def step(batch):
        optimizer.zero_grad()
        fabric.backward(net(batch).square().mean())
        optimizer.step()

    return fabric, net, loader, step


def train_two_epochs(sharding, kind):
    _, _, loader, step = set_up(sharding, kind)
    for batch in itertools.chain(loader, loader):
        step(batch)


@pytest.mark.parametrize(
    ("sharding", "kind"),
    [("none", Stream), slow("full", list), slow("none", list), slow("full", Stream)],
)
def test_a_further_batch_is_refused(sharding, kind):
    """Also where the next epoch would pair with the steps that are left."""
    words = "the ranks read different numbers of batches: rank .* has read all of its .* give all"
    ends_in_seconds(words, train_two_epochs, sharding, kind, within_s=25)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_loop_may_end_before(sharding):
    _, _, loader, step = set_up(sharding)
    for _ in range(2):
        for batch in itertools.islice(loader, min(LENGTHS)):
            step(batch)


@pytest.mark.spmd(2)
def test_ranks_that_compute_alone_may_read_other_numbers():
    fabric, net, loader, step = set_up("none")
    step(torch.ones(1, 1, 5, 5))
    with torch.no_grad():
        number = sum(len(net(batch)) for batch in loader)
    assert number == LENGTHS[fabric.global_rank]
    step(torch.ones(1, 1, 5, 5))
