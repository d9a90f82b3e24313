"""A penalty on the gradients of plain weights, as docs/engine.md shows it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

import lightning_shard
from tests.parity import mesh_of


def penalized(net, x, mean):
    loss = net(x).square().mean()
    weights = list(net.parameters())
    partial = torch.autograd.grad(loss, weights, create_graph=True)
    penalty = sum(mean(g).square().sum() for g in partial)
    (loss + penalty).backward()
    return [weight.grad for weight in weights]


@pytest.mark.spmd(3)
@pytest.mark.parametrize("rows", [13, 2])
def test_a_penalty_on_gradients_of_weights(rows):
    mesh = mesh_of(3)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 1, 1)
    )
    net, x = net.double(), torch.randn(2, 2, rows, 7, dtype=torch.float64)
    wanted = penalized(copy.deepcopy(net), x, lambda g: g)
    split = lightning_shard.shard(x, mesh, 2)
    found = penalized(net, split, lambda g: all_reduce(g, group=mesh.get_group()) / mesh.size())
    for gradient, value in zip(found, wanted, strict=True):
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient / mesh.size(), value, rtol=1e-10, atol=1e-14)


def of_slopes(net, x):
    """A loss of the gradient by the input, as of a physics-informed network."""
    value = net(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    loss = value.square().mean() + slope.square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_loss_of_the_gradient_by_the_input_wants_whole_parameters(mode):
    """FSDP2 has freed its parameters as the second backward pass reads them."""
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 1, 1)).double()
    x = torch.randn(2, 2, 13, 7, dtype=torch.float64)
    plain = copy.deepcopy(net)
    wanted = of_slopes(plain, x.clone().requires_grad_())
    mesh = mesh_of(2)
    lightning_shard.parallelize(net, mesh, options=lightning_shard.ShardingOptions(mode))
    split = lightning_shard.shard(x, mesh, 2).requires_grad_()
    if mode == "full":
        with pytest.raises(RuntimeError, match="but its data is not allocated yet"):
            of_slopes(net, split)
        return
    torch.testing.assert_close(of_slopes(net, split), wanted, rtol=1e-10, atol=1e-14)
    for found, value in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, value.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_second_derivatives_by_the_input_in_a_loss_where_a_rank_has_no_rows(kind):
    """The third backward pass calls the same collectives on a rank without rows."""
    net = nn.Sequential(kind(2, 4, 3, padding=1), nn.Tanh(), kind(4, 1, 3, padding=1)).double()
    x = torch.randn(2, 2, 2, 7, dtype=torch.float64)

    def gradients(net, x):
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope[:, :, -1].square().sum(), x, create_graph=True)
        curve.square().mean().backward()
        return [weight.grad for weight in net.parameters() if weight.grad is not None]

    wanted = gradients(copy.deepcopy(net), x.clone().requires_grad_())
    found = gradients(net, lightning_shard.shard(x, mesh_of(3), 2).requires_grad_())
    for gradient, value in zip(found, wanted, strict=True):
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient / 3, value, rtol=1e-10, atol=1e-14)
