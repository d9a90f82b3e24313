"""Without Lightning: a plain script with a domain mesh, with and without FSDP2."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from neuralop.models import FNO
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import lightning_shard
from lightning_shard import ShardingOptions
from lightning_shard.fsdp.blocks import blocks
from lightning_shard.processes.mesh import make_mesh
from tests.double_fno import to_double
from tests.parity import mesh_of


class Net(nn.Module):
    """Two wide blocks, a scalar parameter, a complex one, and two that share their weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Conv2d(2, 120, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Conv2d(120, 120, 3, padding=1) for _ in range(2)])
        self.last = nn.Conv2d(120, 2, 1)
        self.again = nn.Conv2d(120, 2, 1)
        self.again.weight = self.last.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex64))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.gain * self.phase.abs().sum() * (self.last(x) - self.again(2 * x))


def expected(net, x):
    loss = net(x).square().mean()
    loss.backward()
    return loss, {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.spmd(3)
def test_plain_script_averages_gradients():
    mesh = mesh_of(3)
    net, x = Net(), torch.randn(2, 2, 7, 5)
    loss, grads = expected(copy.deepcopy(net), x)
    split = net(lightning_shard.shard(x, mesh, dims=2)).square().mean()
    split.backward()
    torch.testing.assert_close(split, loss)
    for name, p in net.named_parameters():
        p.grad /= mesh.size()
        dist.all_reduce(torch.view_as_real(p.grad) if p.is_complex() else p.grad)
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-4, atol=1e-5)


@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(2,), (2, 2)], ids=str)
def test_parallelize_shards_parameters_and_averages(domain):
    mesh = make_mesh("cpu", 4 // torch.tensor(domain).prod().item(), domain)
    names = mesh.mesh_dim_names[1:]
    data = mesh["data"]
    net, x = Net(), torch.randn(4, 2, 7, 5)
    loss, grads = expected(copy.deepcopy(net), x)
    with torch.no_grad():
        for p in net.parameters():  # another start on the other ranks
            p.add_(dist.get_rank())
    lightning_shard.parallelize(net, mesh)
    mine = x.chunk(data.size())[data.get_local_rank()]
    split = (
        net(lightning_shard.shard(mine, mesh[names], dims=range(2, 2 + len(domain))))
        .square()
        .mean()
    )
    split.backward()
    total = split.detach() / 4
    dist.all_reduce(total)
    torch.testing.assert_close(total, loss.detach())
    for name, p in net.named_parameters():
        assert isinstance(p, DTensor) or p.ndim == 0
        gradient = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
        if name == "phase":
            gradient = torch.view_as_complex(gradient)
        torch.testing.assert_close(gradient, grads[name], rtol=1e-4, atol=1e-5)


class Turned(nn.Module):
    """A complex parameter without dims."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.turn = nn.Parameter(torch.tensor(0.5 + 2j, dtype=torch.complex64))

    def forward(self, x):
        return (self.conv(x) * self.turn).abs()


@pytest.mark.spmd(2)
def test_a_complex_parameter_without_dims_stays_whole():
    nets, x, mesh = [Turned(), Turned()], torch.randn(2, 2, 7, 5), make_mesh("cpu", 1, (2,))
    lightning_shard.parallelize(nets[1], mesh)
    for net, field in zip(nets, (x, lightning_shard.shard(x, mesh["domain"], 2)), strict=True):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            net(field).square().mean().backward()
            lightning_shard.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    states = [net.state_dict() for net in nets]
    torch.testing.assert_close(states[1]["turn"], states[0]["turn"])
    torch.testing.assert_close(states[1]["conv.weight"].full_tensor(), states[0]["conv.weight"])


def test_blocks_are_the_large_elements_of_lists():
    net = Net()
    assert list(blocks(net)) == list(net.blocks)


@pytest.mark.spmd(4)
def test_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="must be the number of processes, 4"):
        make_mesh("cpu", 3, (2,))


@pytest.mark.spmd(2)
def test_module_on_another_mesh_is_refused():
    net, mesh = Net(), make_mesh("cpu", 2, (1,))
    lightning_shard.parallelize(net, mesh)
    assert lightning_shard.parallelize(net, mesh) == {}
    with pytest.raises(RuntimeError, match=r"sharded over .* load its weights into a new module"):
        lightning_shard.parallelize(net, make_mesh("cpu", 1, (2,)))


@pytest.mark.spmd(2)
def test_submesh_is_enough():
    """A domain mesh that is a part of the world."""
    world = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "domain"))
    x = lightning_shard.shard(torch.arange(6.0), world["domain"], dims=0)
    assert lightning_shard.gather(x * 2).tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.spmd(2)
def test_accumulation_in_a_script():
    """Two backwards of which only the second one communicates; then two that both do."""
    mesh = make_mesh("cpu", 2, (1,))
    net, parts = Net().double(), torch.randn(2, 4, 2, 5, 5, dtype=torch.float64)
    net.phase.data = net.phase.data.to(torch.complex128)
    alone = copy.deepcopy(net)
    for part in parts:
        alone(part).square().mean().backward()
    lightning_shard.parallelize(net, mesh)
    mine = parts.chunk(2, dim=1)[dist.get_rank()]
    for quiet in (True, False):
        with lightning_shard.no_sync(net) if quiet else contextlib.nullcontext():
            net(mine[0]).square().mean().backward()
        net(mine[1]).square().mean().backward()
        for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
            found = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
            wanted = torch.view_as_real(q.grad) if q.is_complex() else q.grad
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12, msg=name)
        net.zero_grad()


@pytest.mark.spmd(2)
def test_fields_split_along_three_dims():
    """Spectral weights then stay whole in a domain: FSDP2 takes DTensors of two axes."""
    mesh = make_mesh("cpu", 1, (2, 1, 1))
    net, x = to_double(FNO((6, 4, 4), 1, 1, 2, n_layers=2)), torch.randn(1, 1, 7, 5, 6)
    loss, grads = expected(copy.deepcopy(net), x.double())
    lightning_shard.parallelize(net, mesh)
    domain = mesh["domain_0", "domain_1", "domain_2"]
    split = net(lightning_shard.shard(x.double(), domain, dims=(2, 3, 4))).square().mean()
    torch.testing.assert_close(split, loss, rtol=1e-10, atol=0)
    split.backward()
    largest = max(float(g.abs().max()) for g in grads.values())
    for name, p in net.named_parameters():
        found = p.grad.full_tensor()
        found = found if found.shape == grads[name].shape else torch.view_as_complex(found)
        torch.testing.assert_close(found, grads[name], rtol=1e-10, atol=1e-10 * largest, msg=name)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("differs", ["width", "name", "order", "dtype", "options"])
def test_modules_that_differ(differs):
    """Without a Trainer, which compares them itself, nobody else would notice."""
    other = dist.get_rank() == 1
    net = nn.Module()
    width = 3 if differs == "width" and other else 2
    names = ["b", "a"] if differs == "order" and other else ["a", "b"]
    for name in names:
        net.add_module(name, nn.Linear(width, 2))
    if differs == "name" and other:
        net.c = net.a
        del net.a
    if differs == "dtype" and other:
        net.double()
    options = {"mode": "none"} if differs == "options" and other else {}
    with pytest.raises(lightning_shard.DisagreementError, match="the ranks' modules differ in"):
        lightning_shard.parallelize(net, mesh_of(2), options=ShardingOptions(**options))


class Branches(torch.nn.Module):
    """One linear map that each rank takes, one that some take, and one that none takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.some, self.never = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, weight):
        y = self.always(x)
        return y if weight is None else y + weight * self.some(x)


def gradients_of_branches(mode, wrap, weights):
    mesh = lightning_shard.init_mesh({"data": 2, "domain": 1})
    rank, net = mesh.get_local_rank("data"), Branches()
    options = ShardingOptions(mode, wrap=wrap)
    lightning_shard.parallelize(net, mesh, options=options)
    net(torch.full((1, 4), rank + 1.0), weights[rank]).square().mean().backward()
    gradients = {name: p.grad for name, p in net.named_parameters()}
    return {
        name: g if g is None else getattr(g, "full_tensor", lambda g=g: g)()
        for name, g in gradients.items()
    }


@pytest.mark.quick_rows("None-weights4-none")
@pytest.mark.parametrize("mode", ["full", "none"])
@pytest.mark.parametrize(
    ("wrap", "weights"),
    [
        *itertools.product([None, ["Linear"]], [(None, None), (1, 0)]),
        (None, (1, None)),  # a block that one rank alone runs: test_other_branches.py
    ],
)
def test_parameters_that_not_every_rank_uses(mode, wrap, weights):
    """DDP's find_unused_parameters; docs/coming_from.md says so."""
    found, _ = lightning_shard.simulate(gradients_of_branches, mode, wrap, weights, processes=2)
    alone = Branches()
    for rank, weight in enumerate(weights):
        loss = alone(torch.full((1, 4), rank + 1.0), weight).square().mean()
        (loss / 2).backward()
    for name, parameter in alone.named_parameters():
        if parameter.grad is None:
            assert found[name] is None
        else:
            torch.testing.assert_close(found[name], parameter.grad)
