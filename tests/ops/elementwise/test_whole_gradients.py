"""What a step sees of the gradients of plain tensors, against one process."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.autograd import Function

import lightning_shard
from lightning_shard.ops.elementwise.whole_gradients import local_gradients, whole_gradients
from tests.pairs import choose
from tests.parity import mesh_of


def unit(gradient):
    return gradient / gradient.norm()


class Unit(Function):
    """Its backward is not linear."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return unit(grads[0])


class Squeeze(nn.Module):
    """A gate of each channel, which is plain, meets a field, which is split."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 1)
        self.gate, self.kind, self.seen = nn.Linear(4, 4), kind, []
        if kind == "hook of a module":
            self.gate.register_full_backward_hook(lambda _, of_x, of_y: (unit(of_x[0]),))
        if kind == "pre-hook of a module":
            self.gate.register_full_backward_pre_hook(lambda _, of_y: (unit(of_y[0]),))

    def forward(self, x):
        weight = self.first.weight * 1
        if self.kind == "hook of a weight":
            weight.register_hook(unit)
        if self.kind == "function of a weight":
            weight = Unit.apply(weight)
        h = nn.functional.conv2d(x, weight, self.first.bias, padding=1)
        gate = self.gate(h.mean((2, 3))).sigmoid()
        match self.kind:
            case "hook":
                gate.register_hook(unit)
            case "partial":
                gate.register_hook(functools.partial(torch.clamp, min=-1e-3, max=1e-3))
            case "two hooks":
                gate.register_hook(unit)
                gate.register_hook(torch.sin)
            case "function":
                gate = Unit.apply(gate)
            case "retained":
                gate.retain_grad()
                self.seen.append(gate)
            case "several tensors":
                torch.autograd.graph.register_multi_grad_hook([gate, weight], self.seen.extend)
            case "rows of this rank":
                rows = h.to_local() if isinstance(h, lightning_shard.DomainTensor) else h
                rows.register_hook(lambda g: g * 0.5)
        return self.last(h * gate[:, :, None, None]).square().mean()

    def found(self):
        tensors = [x.grad if self.kind == "retained" else x for x in self.seen]
        return [*tensors, *(p.grad for p in self.parameters())]


KINDS = (
    "hook", "partial", "two hooks", "function", "retained", "several tensors", "hook of a weight",
    "function of a weight", "hook of a module", "pre-hook of a module", "rows of this rank",
)  # fmt: skip


def run(net, x, mesh=None):
    with whole_gradients(mesh):
        loss = net(x)
    loss.backward()
    return net.found()


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("kind", "rows"), choose(KINDS, [13, 2]))
def test_equals_one_process(kind, rows):
    mesh = mesh_of(3)
    net = Squeeze(kind).double()
    x = torch.randn(2, 2, rows, 7, dtype=torch.float64)
    wanted = run(copy.deepcopy(net), x)
    found = run(net, lightning_shard.shard(x, mesh, 2), mesh)
    seen = len(net.seen)
    for number, (gradient, value) in enumerate(zip(found, wanted, strict=True)):
        if number >= seen:  # those of parameters are added up after the backward pass
            torch.distributed.all_reduce(gradient)
            gradient /= mesh.size()
        torch.testing.assert_close(gradient, value, rtol=1e-10, atol=1e-14)


def fitted(net, x, mesh=None):
    """Train latents within a step, as an auto-decoder does."""
    with whole_gradients(mesh):
        latents = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
        inner = torch.optim.SGD([latents], 0.5, momentum=0.9)
        for _ in range(3):
            inner.zero_grad()
            h = nn.functional.conv2d(x, net.first.weight, padding=1)
            ((h - net.gate(latents)[:, :, None, None]).square().mean()).backward()
            latents.grad.copy_(unit(latents.grad))
            inner.step()
    return latents.detach()


@pytest.mark.spmd(3)
def test_leaves_of_the_step():
    net, x = Squeeze("").double(), torch.randn(2, 2, 13, 7, dtype=torch.float64)
    wanted = fitted(copy.deepcopy(net), x)
    found = fitted(net, lightning_shard.shard(x, mesh_of(3), 2), mesh_of(3))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-14)


LEAVES = {
    "zeros_like": lambda x: torch.zeros_like(x, requires_grad=True),
    "requires_grad_": lambda x: torch.zeros_like(x).requires_grad_(),
    "detach": lambda x: (x * 0).detach().requires_grad_(),
    "Parameter": lambda x: nn.Parameter(torch.zeros_like(x)),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", [*LEAVES, "rows of this rank"])
def test_equal_rows_of_ranks_are_rows(kind):
    """Split leaves of zeros, as of a perturbation, and rows that a step has taken of zeros."""
    whole = torch.arange(8.0)
    seen = []
    with whole_gradients(mesh_of(2)):
        x = lightning_shard.shard(whole, mesh_of(2), 0)
        if kind == "rows of this rank":
            y = torch.zeros_like(x, requires_grad=True) * 1
            y.to_local().register_hook(seen.append)
        else:
            y = LEAVES[kind](x)
        ((x + y) ** 3).sum().backward()
    if kind == "rows of this rank":
        (part,) = seen
        torch.testing.assert_close(part / 2, x.to_local() ** 2 * 3)  # of each rank's replica
    else:
        torch.testing.assert_close(lightning_shard.gather(y.grad), whole**2 * 3)


@pytest.mark.spmd(2)
def test_outside_of_a_step_nothing_travels():
    mesh = mesh_of(2)
    rank = mesh.get_local_rank()
    for scopes in ([], [whole_gradients(mesh), local_gradients()]):
        x = torch.ones(3, requires_grad=True) * 1
        for scope in scopes:
            scope.__enter__()
        seen = []
        x.register_hook(seen.append)
        for scope in reversed(scopes):
            scope.__exit__(None, None, None)
        (x * rank).sum().backward()
        assert torch.equal(seen[0], torch.full((3,), float(rank)))


@pytest.mark.spmd(3)
def test_the_sum_of_half_gradients_need_not_fit():
    weight = torch.ones(1, dtype=torch.float16, requires_grad=True)
    with whole_gradients(mesh_of(3)):
        (gradient,) = torch.autograd.grad((weight * 30_000).sum(), weight)
    assert gradient.item() == 30_000
