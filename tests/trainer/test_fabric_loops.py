"""What a loop of Fabric does between the calls of its modules equals one process, or is refused."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import lightning_shard
from lightning_shard import FabricShardStrategy
from lightning_shard.checkpoint.state import full_module_state
from tests.pairs import choose
from tests.parity import assert_same
from tests.trainer.test_fabric import fabric_of


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 3)).double()


def fields(samples=4):
    return torch.randn(samples, 1, 9, 7, generator=torch.Generator().manual_seed(1)).double()


def fabric_with(**options):
    return fabric_of(FabricShardStrategy(**options))


def own(fabric, x):
    """This rank's part of the samples, or of each of them."""
    strategy = fabric.strategy
    if strategy.domain_size > 1:
        return lightning_shard.shard(x, strategy.domain_mesh, 2)
    return x[fabric.global_rank :: strategy.replicas]


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same_weights(module, expected):
    found = full_module_state(module.module)
    for name, value in expected.state_dict().items():
        assert_same(found[name], value)


def assert_same_step(fabric, net, opt, alone, x):
    fabric.backward(net(own(fabric, x)).square().mean())
    opt.step()
    alone(x).square().mean().backward()
    torch.optim.SGD(alone.parameters(), 0.1).step()
    assert_same_weights(net, alone)


@pytest.mark.spmd(2)
def test_a_value_is_reduced_in_place():
    fabric = fabric_with()
    value = torch.tensor([1.0 + fabric.global_rank], dtype=torch.float64)
    assert fabric.all_reduce(value) is value
    assert value.item() == 1.5
    loss = (nn.Parameter(torch.ones(())) * value).sum().sqrt()
    fabric.all_reduce(loss.detach().clone())
    loss.backward(retain_graph=True)
    fabric.all_reduce(loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_gradients_that_a_loop_asks_for_are_whole(sharding):
    """As a penalty on the slope of a critic, and latents that are trained with the network."""

    def loss_of(net, x, scale, backward):
        guess = net(x) * scale
        (slope,) = torch.autograd.grad(guess.sum(), x, create_graph=True)
        (of_scale,) = torch.autograd.grad(guess.square().sum(), scale, create_graph=True)
        loss = guess.square().mean() + slope.square().mean() + of_scale.square() / 1000
        backward(loss)
        return loss.detach()

    alone, x = network(), fields()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    expected = loss_of(alone, x.requires_grad_(), scale, torch.Tensor.backward)
    fabric = fabric_with(domain_parallel_size=2, sharding=sharding)
    net = fabric.setup(network())
    own_scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    part = own(fabric, x.detach()).requires_grad_()
    assert_same(loss_of(net, part, own_scale, fabric.backward), expected)
    assert_same(whole(own_scale.grad), whole(scale.grad))
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert_same(whole(p.grad), whole(q.grad))


class Sloped(nn.Module):
    """Asks for a gradient of its weights as it runs."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        weight: Any = self.net[0].weight
        loss = self.net(x).square().mean()
        return loss + torch.autograd.grad(loss, weight, create_graph=True)[0].square().sum()


@pytest.mark.spmd(2)
def test_gradients_that_a_forward_asks_for_are_whole():
    alone, x = Sloped(), fields()
    expected = alone(x)
    expected.backward()
    fabric = fabric_with(domain_parallel_size=2)
    net = fabric.setup(Sloped())
    loss = net(own(fabric, x))
    loss.backward()  # does what fabric.backward does
    assert_same(loss.detach(), expected.detach())
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert_same(whole(p.grad), whole(q.grad))


@pytest.mark.spmd(2)
def test_flops_of_a_module_that_is_not_split_are_counted():
    from lightning.fabric.utilities.throughput import measure_flops

    fabric_with(domain_parallel_size=2)
    with torch.device("meta"):
        net, x = nn.Conv2d(1, 1, 3), torch.randn(1, 1, 5, 5)
    assert measure_flops(net, lambda: net(x), lambda y: y.sum()) > 0


@pytest.mark.spmd(2)
@pytest.mark.parametrize("norm_type", ["inf", 1])
def test_norms_of_other_orders(norm_type):
    alone, x = network(), fields()
    alone(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.01, float(norm_type))
    fabric = fabric_with(sharding="full")
    net = network()
    net, opt = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    fabric.backward(net(own(fabric, x)).square().mean())
    found: Any = fabric.clip_gradients(net, opt, max_norm=0.01, norm_type=norm_type)
    assert_same(found, expected)
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert_same(whole(p.grad), whole(q.grad))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_accumulated_gradients_are_dropped_by_zero_grad(sharding, to_none):
    """As of the last batches of an epoch, which fill no step."""
    alone, x = network(), fields()
    alone(x).square().mean().backward()
    expected = [p.grad for p in alone.parameters()]
    fabric = fabric_with(sharding=sharding)
    net = network()
    net, opt = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(2):
        with fabric.no_backward_sync(net):
            fabric.backward(net(own(fabric, x)).mean())
        opt.zero_grad(set_to_none=to_none)
        opt.step()
        fabric.backward(net(own(fabric, x)).square().mean())
        for p, gradient in zip(net.parameters(), expected, strict=True):
            assert_same(whole(p.grad), whole(gradient))
        opt.zero_grad(set_to_none=to_none)
    assert_same_weights(net, alone)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_step_with_gradients_of_one_rank_is_refused(sharding):
    fabric = fabric_with(sharding=sharding)
    net = network()
    net, opt = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    with fabric.no_backward_sync(net):
        fabric.backward(net(own(fabric, fields())).mean())
    with pytest.raises(RuntimeError, match="enabled=False"):
        fabric.clip_gradients(net, opt, max_norm=1.0)
    with pytest.raises(RuntimeError, match="enabled=False"):
        opt.step()
    with fabric.no_backward_sync(net, enabled=False):
        fabric.backward(net(own(fabric, fields())).mean())
    fabric.clip_gradients(net, opt, max_norm=1.0)
    opt.step()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("trains", [True, False])
def test_what_is_written_after_a_forward_stays(trains):
    """Also where no backward pass follows the forward, after which FSDP2 leaves weights whole."""
    fabric = fabric_with(sharding="full")
    raw, x, alone = network(), fields(), network()
    net, opt = fabric.setup(raw, torch.optim.SGD(raw.parameters(), 0.1))
    with torch.set_grad_enabled(trains):
        net(own(fabric, x))
    for module in (raw, alone):
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(2)
    net(own(fabric, x))
    opt.step()  # has no gradients
    assert_same_weights(net, alone)
    with torch.set_grad_enabled(trains):
        net(own(fabric, x))
    net.load_state_dict({name: 2 * value for name, value in network().state_dict().items()})
    assert_same_step(fabric, net, opt, alone, x)


def by_data(p):
    p.data.mul_(2)


def by_new_data(p):
    p.data = p.data * 2


def without_gradient(p):
    with torch.no_grad():
        p.mul_(2)


def to_nothing(p):
    p.data.fill_(float("nan"))
    p.data.nan_to_num_(0.5)


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("then", "write"),
    choose(
        ["forward", "backward", "step", "state"],
        [by_data, by_new_data, without_gradient, to_nothing],
    ),
)
def test_what_is_written_without_a_trace_stays(write, then):
    """Writes through `.data` are not counted, and FSDP2 forgets what it does not hear of."""
    fabric = fabric_with(sharding="full" if then != "state" else "gradients")
    raw, x, alone = network(), fields(), network()
    net, opt = fabric.setup(raw, torch.optim.SGD(raw.parameters(), 0.1))
    sgd = torch.optim.SGD(alone.parameters(), 0.1)
    losses = net(own(fabric, x)).square().mean(), alone(x).square().mean()
    for module in (raw, alone):  # the last bias is not saved for backward
        write(module[2].bias)
        if then != "backward" or write is not without_gradient:
            write(module[0].weight)
    if then == "backward":
        fabric.backward(losses[0])
        losses[1].backward()
    if then in ("backward", "step"):
        opt.step()
        sgd.step()
    if then == "forward":
        with torch.no_grad():
            found = fabric.all_reduce(net(own(fabric, x)).mean())
            assert_same(found, alone(x).mean())
    assert_same_weights(net, alone)
    opt.zero_grad()
    sgd.zero_grad()
    assert_same_step(fabric, net, opt, alone, x)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("write", [by_data, without_gradient])
def test_what_is_written_into_the_parameters_of_an_optimizer_stays(write):
    """It holds shards, of which the module has gathered the whole parameters."""
    fabric = fabric_with(sharding="full")
    raw, x, alone = network(), fields(), network()
    net, opt = fabric.setup(raw, torch.optim.SGD(raw.parameters(), 0.1))
    net(own(fabric, x))
    for p in opt.param_groups[0]["params"]:
        write(p)
    for p in alone.parameters():
        write(p)
    assert_same_step(fabric, net, opt, alone, x)


@pytest.mark.spmd(2)
def test_layers_that_are_frozen_first_train_after_an_evaluation():
    fabric = fabric_with(sharding="full")
    raw, x, alone = network(), fields(), network()
    raw[0].requires_grad_(False)
    net, opt = fabric.setup(raw, torch.optim.SGD(raw[2].parameters(), 0.1))
    with torch.no_grad():
        net(own(fabric, x))
    raw[0].requires_grad_(True)
    opt.add_param_group({"params": [*raw[0].parameters()]})
    assert_same_step(fabric, net, opt, alone, x)


@pytest.mark.spmd(2)
def test_an_average_of_a_module_that_is_whole():
    fabric = fabric_with(domain_parallel_size=2)
    net, x, alone = fabric.setup(network()), fields(), network()
    average = torch.optim.swa_utils.AveragedModel(net)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3)
    average.update_parameters(net)
    with torch.no_grad():
        found = lightning_shard.gather(average(own(fabric, x)))
        for p in alone.parameters():
            p.mul_(3)
        assert_same(found, alone(x))


@pytest.mark.spmd(2)
def test_lbfgs_steps_by_the_mean_loss():
    def steps(net, opt, x, backward):
        def closure():
            opt.zero_grad()
            loss = net(x).square().mean()
            backward(loss)
            return loss

        return [opt.step(closure).detach() for _ in range(2)]

    def made(net):
        return torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe", max_iter=4)

    alone, x = network(), fields()
    expected = steps(alone, made(alone), x, torch.Tensor.backward)
    fabric = fabric_with(sharding="none")
    net = network()
    net, opt = fabric.setup(net, made(net))
    found = steps(net, opt, own(fabric, x), fabric.backward)
    assert_same(torch.stack(found), torch.stack(expected))
    assert_same_weights(net, alone)


@pytest.mark.spmd(2)
def test_a_fabric_that_is_dropped_leaves_a_later_one_as_it_is():
    """Gradients of latents had become those of each rank's rows, in silence."""

    def slope_of(net, x):
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        (net(x) * scale).square().mean().backward()
        assert scale.grad is not None
        return scale.grad

    first = fabric_with(domain_parallel_size=2)
    later = fabric_with(domain_parallel_size=2)
    net = later.setup(network())
    del first
    gc.collect()
    x = fields()
    assert_same(slope_of(net, own(later, x)), slope_of(network(), x))
