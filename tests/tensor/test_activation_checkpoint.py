"""torch.utils.checkpoint in both modes: values, gradients, random numbers, and with FSDP2."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import lightning_shard
from tests.pairs import choose
from tests.parity import mesh_of

SHAPES = (2, 3, 7, 5), (4, 3, 3, 3)


def conv(x, w):
    return F.conv2d(x, w, padding=1).tanh()


def several(x, w):
    return conv(x, w), x.mean(), x * 2


def twice(a, b, w):
    return conv(a * b, w)


def chosen(x, w):
    """Rows that the values decide: of a mask, of an index, added up again."""
    rows = x[x[:, :1].expand_as(x) > 0]
    places = (x[0, 0].detach() * 10).long().abs() % 7
    near = conv(x, w).movedim(2, 0)[places].sum(1)
    y = x.clone()
    y[x > 1] = rows.mean()
    return rows.sort().values, torch.zeros_like(near).index_add(0, places[:, 0], near), y


FUNCTIONS = {
    "rows that values choose": lambda run, x, w: run(chosen, x, w),
    "plain": lambda run, x, w: run(conv, x, w),
    "weight of the closure": lambda run, x, w: run(lambda a: conv(a, w), x),
    "split tensor of the closure": lambda run, x, w: run(lambda b: conv(x, b), w),
    "several outputs": lambda run, x, w: run(several, x, w),
    "unused outputs": lambda run, x, w: run(several, x, w)[0],
    "loss inside": lambda run, x, w: run(lambda a, b: conv(a, b).mean(), x, w) * x,
    "the same input twice": lambda run, x, w: run(twice, x, x, w) + x.sum(),
    "no tensors between": lambda run, x, w: run(lambda a, n, b, m: conv(a * n, b), x, 3, w, None),
    "nested": lambda run, x, w: run(lambda a, b: run(conv, a.sin(), b).cos(), x * 2, w),
    "nested, of a plain factor": lambda run, x, w: run(
        lambda a: run(lambda b: (b * w.mean()).sin(), a.cos()).exp(), x
    ),
    "the other mode inside": lambda run, x, w: run(
        lambda a, b: run.other(conv, a.sin(), b).cos(), x * 2, w
    ),
    "in place afterwards": lambda run, x, w: run(lambda a, b: conv(a, b) + 1, x, w).mul_(2).relu_(),
    "input returned": lambda run, x, w: run(lambda a: a, x.sin()) * w.sum(),
    "plain input of the whole shape": lambda run, x, w: run(
        lambda a, b: (a * b).tanh(), x, w.sum() + torch.zeros(SHAPES[0], dtype=w.dtype)
    ),
    "dropout": lambda run, x, w: run(lambda a, b: F.dropout(conv(a, b), 0.4), x, w),
    "sequential": lambda run, x, w: run.sequence([torch.sin, torch.tanh, torch.cos], x) * w.sum(),
}


class Checkpoint:
    def __init__(self, reentrant):
        self.reentrant = reentrant

    def __call__(self, function, *args):
        return checkpoint(function, *args, use_reentrant=self.reentrant)

    def other(self, function, *args):
        return checkpoint(function, *args, use_reentrant=not self.reentrant)

    def sequence(self, functions, x):
        return checkpoint_sequential(functions, 2, x, use_reentrant=self.reentrant)


class Direct:
    def __call__(self, function, *args):
        return function(*args)

    other = __call__

    def sequence(self, functions, x):
        for function in functions:
            x = function(x)
        return x


def gradients(function, run, x, w):
    torch.manual_seed(5)
    outputs = function(run, x, w)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wholes = [lightning_shard.gather(o) for o in outputs]
    torch.rand(3)  # the state of the generator is not that of the forward
    sum(whole.square().sum() for whole in wholes).backward()
    return wholes


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("name", "way"), choose(FUNCTIONS, product([[2], [2, 3]], [True, False])), ids=str
)
def test_checkpoint(name, way):
    dims, reentrant = way
    run = Checkpoint(reentrant)
    mesh = mesh_of(4) if len(dims) == 1 else mesh_of(2, 2)
    x, w = (torch.randn(shape, dtype=torch.float64) for shape in SHAPES)
    split = [lightning_shard.shard(x, mesh, dims).clone().requires_grad_() for _ in range(2)]
    plain = [w.clone().requires_grad_() for _ in range(2)]
    wanted = gradients(FUNCTIONS[name], Direct(), split[0], plain[0])
    found = gradients(FUNCTIONS[name], run, split[1], plain[1])
    for value, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, expected)
    torch.testing.assert_close(split[1].grad.to_local(), split[0].grad.to_local())
    for p in plain:
        if p.grad is not None:
            dist.all_reduce(p.grad)
    torch.testing.assert_close(plain[1].grad, plain[0].grad)


@pytest.mark.spmd(3)
def test_a_reentrant_checkpoint_refuses_as_torch_does():
    x = lightning_shard.shard(torch.randn(2, 7), mesh_of(3), 1).requires_grad_()
    with pytest.raises(RuntimeError, match=r"incompatible with \.grad"):
        torch.autograd.grad(checkpoint(torch.sin, x, use_reentrant=True).sum(), x)
    y = x.sin()
    z = checkpoint(torch.sin, y, use_reentrant=True)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.large = nn.Parameter(torch.randn(100, 1000) / 100)  # a group of its own for FSDP2

    def forward(self, x, scale):
        return x + torch.tanh(self.norm(self.conv(x))) * scale + self.large.mean()


class Net(nn.Module):
    def __init__(self, wrap=None, run=None):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
        blocks = [Block() for _ in range(2)]
        if wrap is not None:
            blocks = [checkpoint_wrapper(b, checkpoint_impl=wrap) for b in blocks]
        self.blocks, self.run = nn.ModuleList(blocks), run or Direct()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x, 0.5)
        return self.last(x)


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("wrap", "run"),
    [*((impl, None) for impl in CheckpointImpl), (None, Checkpoint(True))],
)
def test_with_fsdp2(wrap, run):
    mesh, x = mesh_of(2), torch.randn(2, 2, 7, 5, dtype=torch.float64)
    alone, net = Net().double(), Net(wrap, run).double()
    lightning_shard.parallelize(net, mesh)
    for model, batch in ((alone, x), (net, lightning_shard.shard(x, mesh, 2))):
        model(batch).square().mean().backward()
    found = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in net.named_parameters()}
    for name, p in alone.named_parameters():
        gradient = found[name].grad
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(gradient.full_tensor(), p.grad, rtol=1e-10, atol=1e-12)
