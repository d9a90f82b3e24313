"""One rank of many that runs alone: it computes, holds and sends what it does among the others."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import lightning_shard
from lightning_shard import simulate
from lightning_shard.lab.batches import first_batches
from lightning_shard.lab.record import Inspection, record_here
from lightning_shard.lab.run import Task
from lightning_shard.trainer.profile.traffic import counted
from tests.lab.test_check import Net, data


def step(sizes: dict[str, int]) -> tuple[int, int, list[Any], Any]:
    """What a rank sends, how often, which shapes it keeps for backward, and its gradients'."""
    torch.manual_seed(0)
    mesh = lightning_shard.init_mesh(sizes)
    net = nn.Sequential(nn.Conv2d(2, 4, 5, padding=2), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 3))
    lightning_shard.parallelize(net, mesh)
    axes = tuple(sizes)[1:]
    x = lightning_shard.shard(torch.randn(1, 2, 21, 19), mesh[axes], range(2, 2 + len(axes)))
    kept: list[Any] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with counted() as traffic, saved_tensors_hooks(keep, lambda tensor: tensor):
        net(x).square().mean().backward()
    grads: list[Any] = [p.grad for p in net.parameters()]
    shapes = [tuple(grad.to_local().shape) for grad in grads]
    return traffic.bytes, traffic.calls, kept, shapes


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "a": 3}, {"data": 1, "a": 3, "b": 2}])
def test_a_step_has_the_shapes_and_the_traffic_of_each_rank(sizes):
    processes = math.prod(sizes.values())
    for rank, expected in enumerate(simulate(step, sizes, processes=processes)):
        assert simulate(step, sizes, processes=processes, rank=rank) == [expected]


def test_one_rank_of_a_large_mesh_runs():
    sizes = {"data": 32, "a": 4, "b": 4}
    ((sent, calls, *_),) = simulate(step, sizes, processes=512, rank=37)
    assert sent > 0
    assert calls > 0


def answers() -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, place = torch.tensor([1.0, 2.0]), torch.empty(2)
    whole = torch.arange(2.0 * ranks)
    found: dict[str, Any] = {"rank": (rank, ranks)}
    dist.all_reduce(own)
    found["sum"] = own.tolist()
    gathered = torch.empty(2 * ranks)
    dist.all_gather_into_tensor(gathered, own)
    found["gathered"] = gathered.tolist()
    dist.reduce_scatter_tensor(place, whole)
    found["scattered"] = place.tolist()
    dist.all_to_all_single(uneven := torch.empty(5), whole, [2, 1, 2], [2, 2, 2])
    found["exchanged"] = uneven.tolist()
    dist.recv(place, 0)
    found["received"] = place.tolist()
    names: list[Any] = [None] * ranks
    dist.all_gather_object(names, "mine")
    given = ["kept"]
    dist.broadcast_object_list(given, src=0)
    found["objects"] = [*names, *given]
    return found


def test_collectives_give_what_the_rank_brings():
    before = dist.all_gather_object, dist.broadcast_object_list
    assert simulate(answers, processes=3, rank=2) == [
        {
            "rank": (2, 3),
            "sum": [1, 2],
            "gathered": [1, 2] * 3,
            "scattered": [4, 5],
            "exchanged": [0, 1, 0, 4, 5],  # zeros where sizes differ
            "received": [0, 0],
            "objects": ["mine"] * 3 + ["kept"],
        }
    ]
    assert (dist.all_gather_object, dist.broadcast_object_list) == before


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_is_not_there(rank):
    with pytest.raises(ValueError, match=f"rank must be from 0 to 2; got {rank}"):
        simulate(answers, processes=3, rank=rank)


def step_of_a_trainer(task: Task) -> tuple[int, int, Any, Any]:
    """What a rank sends, how often, and what it keeps of its batch and for backward."""
    kept: list[Any] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with counted() as traffic, saved_tensors_hooks(keep, lambda tensor: tensor):
        found = record_here(task, Inspection())
    return traffic.bytes, traffic.calls, found.split, kept


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "domain"), [(0, (2,)), (5, (2, 2))])
def test_a_step_of_a_trainer(rank, domain):
    """Of ranks that agree on their options before they begin, and compare what they have read."""
    mesh = 8 // math.prod(domain), *domain
    task = Task(Net(), None, first_batches(Net(), data(), "fit"), mesh)
    among = simulate(step_of_a_trainer, task, processes=8)[rank]
    assert simulate(step_of_a_trainer, task, processes=8, rank=rank) == [among]
    assert among[0] > 0
    assert among[2].split
