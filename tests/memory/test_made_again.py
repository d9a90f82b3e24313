"""What cheap functions made is made again, bit for bit, of what is kept."""

from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_shard.memory import made_again, offload
from lightning_shard.memory.made_again import Makers
from tests.memory.simulated_driver import on_machine

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


def trained(function, budget, *, cheap=True):
    """The gradients, the machine, and how many tensors were made again."""
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
        machine, found = on_machine(program, 2 * 8 * KIB, small=2 * KIB, cheap=cheap)
    assert machine.races == []
    return found, machine, made["again"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    expected, _, none = trained(FUNCTIONS[name], 2**30)
    assert not none
    found, _, made = trained(FUNCTIONS[name], 0)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (made > 0) is (name not in KEPT)


def test_under_autocast():
    """Operands are cast as they were, whatever the mode of backward."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, 16)
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(),
                        nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 1))  # fmt: skip

    def program(budget):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            with offload.OnHost(budget):
                y = net(x)
            loss = y.float().square().mean()
            loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in net.parameters())]

    expected, _ = program(2**30), None
    machine, found = on_machine(lambda: program(0), 8 * KIB, small=2 * KIB)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert machine.races == []


def network():
    """Costly layers between cheap ones."""
    torch.manual_seed(0)
    layers = []
    for _ in range(6):
        layers += [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 1)).double()


def step(net, x, budget=0):
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
        out = machine.beside["out"]
        assert sum(s.stream is out and bool(s.run) for s in machine.steps) == copies


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
