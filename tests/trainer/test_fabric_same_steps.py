"""What ranks of one domain do differently in a loop of Fabric is refused."""

import pytest
import torch

from tests.trainer.featured import loader
from tests.trainer.test_fabric_loops import fabric_with, network


def doubled_field(fabric, field):
    return (field * 2 if fabric.global_rank == fabric.world_size - 1 else field).square().mean()


def doubled_loss(fabric, field):
    loss = field.square().mean()
    return loss * 2 if fabric.global_rank == fabric.world_size - 1 else loss


def looks(fabric, field):
    if fabric.is_global_zero:
        seen = str(field), field.shape, field.detach(), field.data, field.clone()
        assert seen[-1].detach().cpu().to_local().shape[2:] < field.shape[2:]
    return field.square().mean()


def train(fabric, loss_of, trains=True):
    net = fabric.setup(network())
    opt = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), 0.1))
    with torch.set_grad_enabled(trains):
        for batch in fabric.setup_dataloaders(loader(2, 4)):
            loss = loss_of(fabric, net(batch["x"]))
            if trains:
                fabric.backward(loss)
                opt.step()
                opt.zero_grad()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_what_one_rank_computes_alone_is_refused(sharding, trains):
    fabric = fabric_with(domain_parallel_size=2, sharding=sharding)
    named = r"rank 0 has called Tensor\.mul on split tensors 0 times, and rank 1 1 times"
    with pytest.raises(ValueError, match=named):
        train(fabric, doubled_field, trains)


@pytest.mark.spmd(2)
def test_another_loss_on_one_rank_is_refused():
    with pytest.raises(ValueError, match=r"the losses of these steps differ: .* on rank 1"):
        train(fabric_with(domain_parallel_size=2), doubled_loss)


@pytest.mark.spmd(4)
def test_each_domain_compares_alone():
    """Replicas may compute other things; the ranks are named as the process group counts them."""
    fabric = fabric_with(domain_parallel_size=2)
    if fabric.global_rank < 2:
        train(fabric, looks, trains=False)
    else:
        with pytest.raises(ValueError, match=r"rank 2 has called .* and rank 3 1 times"):
            train(fabric, doubled_field, trains=False)


@pytest.mark.spmd(2)
def test_one_rank_may_look():
    train(fabric_with(domain_parallel_size=2), looks)
