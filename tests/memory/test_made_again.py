"""What cheap functions made is made again, bit for bit, of what is kept."""

import random
from collections import Counter
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_shard.lab.device_autocast import autocast_of_gpu
from lightning_shard.memory import made_again, offload
from lightning_shard.memory.made_again import Makers
from tests.memory.simulated_driver import on_machine
from tests.pairs import choose

KIB = 2**10
SHAPE = 2, 8, 8, 8  # 8 KiB in float64


def norm(kind, *args, **options):
    module = kind(*args, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.linspace(0.5, 1.5, p.numel()).view(p.shape))
    return module


def averaged(x):
    """Batch norm that keeps running averages."""
    return norm(nn.BatchNorm2d, 8)(x)


ONES = torch.ones(8, 8, 8, dtype=torch.float64)
FUNCTIONS = {
    "relu": F.relu, "gelu": F.gelu, "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": nn.SiLU(), "mish": F.mish, "elu": lambda x: F.elu(x, 0.5), "celu": F.celu,
    "selu": F.selu, "leaky relu": lambda x: F.leaky_relu(x, 0.2), "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.4), "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid, "softplus": lambda x: F.softplus(x, beta=2.0),
    "softsign": F.softsign, "logsigmoid": F.logsigmoid, "tanh": torch.tanh,
    "sigmoid": lambda x: x.sigmoid(), "exp": torch.exp, "square": torch.square,
    "power": lambda x: x**2, "absolute": abs, "negative": lambda x: -x, "sum": lambda x: x + 1,
    "difference": lambda x: 1.5 - x, "product": lambda x: 3 * x, "quotient": lambda x: x / 3,
    "root": lambda x: x.abs().sqrt(), "reciprocal": lambda x: (x.abs() + 1).reciprocal(),
    "of itself": lambda x: x * torch.sigmoid(1.702 * x),
    "with a part of itself": lambda x: x - x[:, :1],
    "with statistics": lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6),
    "alpha": lambda x: torch.add(x, x.tanh(), alpha=0.1),
    "in place": lambda x: F.relu(x * 2, inplace=True),
    "methods in place": lambda x: x.mul(2).add_(1).relu_(),
    "operators in place": lambda x: F.silu((x * 1).__iadd__(2), True),
    "clamp": lambda x: x.clamp(min=-0.5), "copy": torch.clone,
    "joined": lambda x: torch.cat([x[:, :5], x.tanh()[:, 2:5]], 1),
    "batch norm": averaged, "evaluated": lambda x: norm(nn.BatchNorm2d, 8).eval()(x),
    "batch norm and relu": lambda x: F.relu(averaged(x), inplace=True),
    "group norm": norm(nn.GroupNorm, 2, 8, eps=1e-3),
    "layer norm": norm(nn.LayerNorm, 8, eps=1e-3),
    "a large weight": lambda x: F.layer_norm(x, x.shape[1:], ONES, ONES),
    "rms norm": norm(nn.RMSNorm, 8), "instance norm": norm(nn.InstanceNorm2d, 8, eps=1e-3),
    "averaged instances": norm(nn.InstanceNorm2d, 8, affine=True, track_running_stats=True),
    "a cumulative sum": lambda x: x.cumsum(1), "sine": torch.sin,
    "nearest": lambda x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, size=(8, 8), mode="bilinear", align_corners=True),
    "largest": lambda x: F.max_pool2d(x, 3, 1, 1), "mean": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "single": lambda x: x.float().tanh().double(), "half": lambda x: x.to(torch.half).double(),
    "turned": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3).tanh(),
    "channels last": lambda x: F.gelu(x.contiguous(memory_format=torch.channels_last)),
    "flat": lambda x: F.gelu(x.flatten(2)).view(SHAPE), "expanded": lambda x: x + x[:1, :1],
}  # fmt: skip

KEPT = {"sine", "a cumulative sum"}  # these functions are not known as cheap


def trained(function, budget):
    """The loss and gradients, and how many calls were made again."""
    torch.manual_seed(0)
    x = torch.randn(SHAPE, dtype=torch.float64)
    weights = [torch.rand(8, 8, 1, 1, dtype=torch.float64) / 8 for _ in range(4)]
    for weight in weights:
        weight.requires_grad_()
    made, plain = Counter(), made_again.Made.again

    def again(self, value):
        made["again"] += 1
        return plain(self, value)

    def program():
        with offload.OnHost(budget):
            y = F.conv2d(x, weights[0])
            for weight in weights[1:]:
                y, kept = F.conv2d(function(y), weight), y
                y = y + kept.square().mean()  # which is a tensor that backward needs
        loss = y.square().sum()
        loss.backward()
        return [loss.detach(), *(w.grad for w in weights)]

    with mock.patch.object(made_again.Made, "again", again):
        machine, found = on_machine(program, 2 * 8 * KIB, small=2 * KIB)
    assert machine.races == []
    return found, made["again"]


@pytest.mark.parametrize("name", choose(FUNCTIONS, every=2))
def test_functions(name):
    expected, none = trained(FUNCTIONS[name], 2**30)
    assert not none
    found, made = trained(FUNCTIONS[name], 0)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (made > 0) is (name not in KEPT)


def copied(machine):
    """Count the tensors that went to the host."""
    return sum(s.stream is machine.beside["out"] and bool(s.run) for s in machine.steps)


# torch 2.11 says once that autocast of a GPU takes the place of autocast of a CPU
IN_PLACE = pytest.mark.filterwarnings("ignore:Warning only once:UserWarning")


@IN_PLACE
@pytest.mark.parametrize("like", [nullcontext, autocast_of_gpu])
def test_under_autocast(like):
    """Casts of autocast are made again, too; those of a GPU go to float32 and back."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, 16)
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(),
                        nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 1))  # fmt: skip

    def program(budget):
        net.zero_grad()
        with like(), torch.autocast("cpu", torch.bfloat16):
            with offload.OnHost(budget):
                y = net(x)
            loss = y.float().square().mean()
            loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in net.parameters())]

    expected = program(2**30)
    for cheap, copies in ((True, 3), (False, 5)):
        machine, found = on_machine(lambda: program(0), 8 * KIB, small=2 * KIB, cheap=cheap)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert machine.races == []
        assert copied(machine) == copies


def test_a_cast_whose_source_was_written_since():
    """A call that is given both saves the cast, which was made of other numbers."""
    weight = torch.rand(8, 8, 1, 1, requires_grad=True)
    x = torch.rand(2, 8, 8, 8)

    def product():
        source = F.conv2d(x, weight).float()
        cast = source.to(torch.bfloat16)
        source.detach().fill_(2)
        return source * cast

    def program():
        with torch.autocast("cpu", torch.bfloat16), offload.OnHost(0):
            y = F.conv2d(F.conv2d(product(), weight), weight)
        y.float().sum().backward()

    machine, _ = on_machine(program, KIB, small=KIB)
    found, weight.grad = weight.grad, None
    program()
    assert torch.equal(found, weight.grad)
    assert machine.races == []


def network():
    """Costly layers between cheap ones."""
    torch.manual_seed(0)
    layers = []
    for _ in range(6):
        layers += [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 1)).double()


def step(net, x, budget):
    with offload.OnHost(budget):
        y = net(x)
    loss = y.square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters()), *net.buffers()]


@pytest.mark.parametrize("budget", [0, 3 * 8 * KIB, None])
def test_only_what_is_costly_travels(budget):
    """Half of what a network of convolutions, norms and activations keeps is made again."""
    x = torch.randn(SHAPE, dtype=torch.float64)
    expected = step(network(), x, 2**30)
    for cheap, copies in ((True, 6), (False, 11)):
        machine, found = on_machine(
            lambda: step(network(), x, budget), 8 * KIB, small=2 * KIB, cheap=cheap
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert machine.races == []
        assert copied(machine) == copies


class Random(nn.Module):
    """Layers in any order, whose results are read by any later ones."""

    CHEAP = (
        nn.ReLU, partial(nn.ReLU, inplace=True), nn.GELU, partial(nn.SiLU, inplace=True), nn.Tanh,
        partial(nn.LeakyReLU, 0.1, inplace=True), partial(nn.GroupNorm, 2, 8),
        partial(nn.BatchNorm2d, 8), partial(nn.InstanceNorm2d, 8, affine=True),
        partial(nn.LayerNorm, 8), partial(nn.MaxPool2d, 3, 1, 1), partial(nn.AvgPool2d, 3, 1, 1),
    )  # fmt: skip
    WAYS = ("layer", "layer", "layer", "add", "add in place", "multiply", "join", "gate", "turn")

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.choose = random.Random(seed)
        kinds = [partial(nn.Conv2d, 8, 8, 3, padding=1), *self.CHEAP]
        made = [kinds[i]() for i in self.choose.choices(range(len(kinds)), [4, *12 * [1]], k=12)]
        self.layers, self.narrow = nn.ModuleList(made), nn.Conv2d(16, 8, 1)

    def forward(self, x):
        choose = random.Random(self.choose.random())
        kept, y = [x], nn.functional.conv2d(x, self.narrow.weight[:, :8])
        for layer in self.layers:
            way, other = choose.choice(self.WAYS), choose.choice(kept)
            if way == "layer":
                y = layer(y)
            elif way == "add in place":
                y = y * 0.5
                y += other
            elif way == "join":
                y = self.narrow(torch.cat([y, other], 1))
            elif way == "gate":
                y = y * torch.sigmoid(other)
            elif way == "turn":
                y = y.transpose(2, 3).contiguous()[:, :, ::1].mul(0.5) - 0.1
            else:
                y = y + 0.5 * other if way == "add" else (y * other).clamp(-2, 2)
            if choose.random() < 0.4:
                kept.append(y.clone() if choose.random() < 0.5 else F.softplus(y))
        return y


@IN_PLACE
@pytest.mark.slow_rows("1", "2")
@pytest.mark.parametrize("seed", choose(range(300), fast=range(3)))
def test_random_networks(seed):
    """Losses, gradients and running averages are those of a run without offload, bit for bit."""
    chosen = random.Random(seed)
    like = chosen.choice([nullcontext, autocast_of_gpu])
    half = chosen.random() < 0.5
    budget = chosen.choice([0, 0, 5 * KIB, 15 * KIB, None])

    def program(offloaded):
        net, found = Random(seed), []
        for _ in range(2):
            x = torch.randn(2, 8, 8, 8)
            with like():
                with torch.autocast("cpu", torch.bfloat16, enabled=half), offloaded():
                    y = net(x)
                loss = y.float().square().mean()
                loss.backward()
            found.append(loss.detach())
        return [*found, *(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]

    try:
        expected = program(nullcontext)
    except RuntimeError:  # it writes what backward needs
        with pytest.raises(RuntimeError, match=r"modified by an inplace|was written in place"):
            on_machine(lambda: program(lambda: offload.OnHost(budget)), 4 * KIB, small=KIB)
        return
    machine, found = on_machine(lambda: program(lambda: offload.OnHost(budget)), 4 * KIB, small=KIB)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert machine.races == []


@pytest.mark.parametrize("late", [False, True])
def test_a_source_that_is_written(late):
    """Before the tensor leaves that it made, this one travels; later backward refuses it."""
    weight = torch.rand(8, 8, 1, 1, dtype=torch.float64, requires_grad=True)
    x = torch.randn(SHAPE, dtype=torch.float64)

    def program():
        with offload.OnHost(0):
            source = F.conv2d(x, weight)
            unused = source.square().sum()  # saves it, and takes no part in the loss
            y = F.conv2d(source.tanh(), weight)
            if not late:
                source.detach().zero_()
            y = F.conv2d(F.conv2d(y, weight), weight)
        if late:
            source.detach().zero_()
        y.square().sum().backward()
        return unused

    if late:
        with pytest.raises(RuntimeError, match="backward needs was written in place"):
            on_machine(program, 8 * KIB, small=2 * KIB)
    else:
        machine, _ = on_machine(program, 8 * KIB, small=2 * KIB)
        grad, weight.grad = weight.grad, None
        program()  # on the CPU nothing leaves
        assert torch.equal(grad, weight.grad)
        assert machine.races == []


def test_a_compiled_network():
    """The compiler sees no call of ours."""
    net = network()
    whole = torch.compile(net, fullgraph=True, backend="eager")
    x = torch.randn(SHAPE, dtype=torch.float64)
    with made_again.Noting(Makers(lambda x: True, lambda: 1)):
        y = whole(x)
    assert torch.equal(y, network()(x))


def test_calls_of_many_steps_are_not_kept():
    """A state that each step makes of the one before needs no more memory for its calls."""
    makers = Makers(lambda x: True, lambda: 1)
    state = torch.randn(4, 4)
    for _ in range(100):
        state = makers.noted(torch.tanh, torch.tanh, (state,), {})
    made, depth = makers.of(state), 0
    assert made.calls <= 8
    while made is not None:
        (operand,) = made.operands
        made, depth = operand.made, depth + 1
    assert depth <= 8
