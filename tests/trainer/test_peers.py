"""The collectives of a strategy, without a Trainer."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_shard import UnsupportedOperationError, shard
from lightning_shard.trainer.peers import Peers
from tests.parity import mesh_of
from tests.trainer.featured import Featured, assert_same_state, fit_alone, fit_sharded

CPU = torch.device("cpu")


def running():
    return Peers(lambda: False)


@pytest.mark.spmd(2)
def test_reduce_leaves_its_tensor_and_does_not_overflow():
    given = torch.tensor([40_000.0], dtype=torch.float16)
    found = running().reduce(given, CPU, group=None, reduce_op="mean", copies=1)
    assert found.dtype == torch.float16
    assert found == given == 40_000
    with pytest.raises(ValueError, match="'average' is no reduction; name one of mean"):
        running().reduce(given, CPU, group=None, reduce_op="average", copies=1)


@pytest.mark.spmd(2)
def test_broadcast_and_barrier():
    peers, rank = running(), dist.get_rank()
    peers.barrier(CPU)
    assert peers.broadcast({"rank": rank}) == {"rank": 0}
    assert peers.broadcast(rank, src=1) == 1


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("reduce_op", "expected"),
    [
        ("sum", 3),  # the two ranks of a domain are counted once
        (dist.ReduceOp.SUM, 6),
        (None, 6),
        ("mean", 1),  # of integers: 6 / 4
        ("max", 3),
    ],
    ids=str,
)
def test_reduce_over_all_ranks(reduce_op, expected):
    number = torch.tensor(dist.get_rank())
    found = running().reduce(number, CPU, group=None, reduce_op=reduce_op, copies=2)
    assert found.dtype == torch.int64
    assert found == expected


@pytest.mark.spmd(4)
def test_reduce_over_a_group_of_ranks():
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "member"))
    group = pairs["member"].get_group()
    number = torch.tensor(float(dist.get_rank()))
    found = running().reduce(number, CPU, group=group, reduce_op="sum", copies=2)
    assert found == (1.0 if dist.get_rank() < 2 else 5.0)
    assert running().reduce("no tensor", CPU, group=group, reduce_op="sum") == "no tensor"


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sizes", [(3, 2), (1, 0)], ids=str)
def test_values_of_other_shapes_are_not_reduced(sizes):
    with pytest.raises(ValueError, match="reduce was given tensors that differ"):
        running().reduce(torch.ones(sizes[dist.get_rank()]), CPU, group=None, reduce_op="sum")


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sync_grads", [True, False])
def test_all_gather(sync_grads):
    rank = dist.get_rank()
    here = torch.full((3,), float(rank), requires_grad=True)
    found = running().all_gather(here, CPU, group=None, sync_grads=sync_grads)
    assert found.tolist() == [[0.0] * 3, [1.0] * 3]
    assert found.requires_grad is sync_grads
    if sync_grads:
        (gradient,) = torch.autograd.grad((found * torch.tensor([[2.0], [3.0]])).sum(), here)
        assert gradient.tolist() == [2.0 * (2 + rank)] * 3  # of the losses of both ranks


@pytest.mark.spmd(2)
def test_a_split_tensor_is_not_gathered():
    split = shard(torch.zeros(1, 1, 4), mesh_of(2), 2)
    with pytest.raises(UnsupportedOperationError, match="gather"):
        running().all_gather(split, CPU, group=None)


@pytest.mark.spmd(2)
def test_a_rank_that_fails_alone_waits_for_nobody():
    failing = dist.get_rank() == 1
    peers = Peers(lambda: failing)
    peers.watch()
    try:
        if failing:
            try:
                raise KeyError("lost")
            except KeyError:
                assert peers.is_disconnected()
            number = torch.tensor(7.0)
            assert peers.broadcast("mine") == "mine"
            assert peers.reduce(number, CPU, group=None, reduce_op="sum") is number
            peers.barrier(CPU)
        else:
            assert not peers.is_disconnected()
    finally:
        peers.close()
    dist.barrier()


@pytest.mark.spmd(2)
def test_ranks_that_all_fail_may_still_talk():
    peers = Peers(lambda: True)
    peers.watch()
    dist.barrier()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert not peers.is_disconnected()
    assert peers.broadcast(dist.get_rank()) == 0
    peers.close()


class Contrasts(Featured):
    """A loss of all samples of a step, wherever they are."""

    def training_step(self, batch, batch_idx):
        errors = (self(batch["x"]) - batch["y"]).square().mean((1, 2, 3))
        if self.trainer.world_size > 1:
            errors = self.all_gather(errors, sync_grads=True)
        return errors.std()


@pytest.mark.quick_rows("4x1")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(1,), (2,), (2, 2)], ids=["4x1", "2x2", "1x(2x2)"])
def test_gradients_through_all_gather(domain):
    expected, found = Contrasts(), Contrasts()
    fit_alone(expected, limit_val_batches=0)
    fit_sharded(found, domain, limit_val_batches=0)
    assert_same_state(found, expected)
