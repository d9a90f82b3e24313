"""Plain tensors that take split rows: they become split, unless something still sees them whole."""

import pytest
import torch
from torch import nn

import lightning_shard
from lightning_shard import DomainTensor, UnsupportedOperationError
from tests.parity import mesh_of

SHAPE = (2, 3, 7, 5)


def rollout(x):
    out = torch.zeros(2, 4, *SHAPE[1:], dtype=x.dtype)
    for step in range(4):
        x = x + 0.1 * x.sin()
        out[:, step] = x
    return out.square(), out


def shifted(x):
    out = x.new_zeros(x.shape)
    out[:, :, 1:] = x[:, :, :-1].clone()
    out[:, :, 0] = 7.0
    return out * x


def windows(x):
    out = torch.zeros(2, 6, 11, 9, dtype=x.dtype)
    out[:, ::2, 2:9, 3:-1] = x
    out[..., 4] = x[:, :1, 0, :1]
    return out.cumsum(2), out.mean((2, 3))


def accumulated(x):
    total = torch.zeros(SHAPE, dtype=x.dtype)
    for k in range(3):
        total += k * x
    best = torch.full(SHAPE, -1.0, dtype=x.dtype)
    best.copy_(x).clamp_(min=0.1)
    return total.clone() * best, total.add_(x) * 2


def of_graph(x, w):
    out = w * 2
    out[:, 1] = x[:, 0] * w[:, 2]
    out.mul_(x)
    return out


def masked(x):
    out, again = torch.ones(SHAPE, dtype=x.dtype), torch.ones(SHAPE, dtype=x.dtype)
    out[x > 0] = 3.0
    return out * x, again.masked_fill_(x > 0.5, 2.0)


def one_hot(x):
    classes = x.detach().argmax(1, keepdim=True)
    out, counts = torch.zeros(SHAPE, dtype=x.dtype), torch.zeros(SHAPE, dtype=x.dtype)
    counts.scatter_add_(dim=1, index=classes, src=x[:, :1])
    return out.scatter_(dim=1, index=classes, value=1) * x, counts


CASES = {
    "one_hot": (one_hot, [SHAPE]),
    "rollout": (rollout, [SHAPE]),
    "shifted": (shifted, [SHAPE]),
    "windows": (windows, [SHAPE]),
    "accumulated": (accumulated, [SHAPE]),
    "of_graph": (of_graph, [SHAPE, SHAPE]),
    "masked": (masked, [SHAPE]),
}


@pytest.mark.spmd(2)
def test_the_same_object_becomes_split():
    x = lightning_shard.shard(torch.randn(SHAPE), mesh_of(2), 2)
    out = torch.zeros(SHAPE)
    alias = out
    out[:, 1] = x[:, 0]
    assert alias is out
    assert isinstance(out, DomainTensor)
    assert out.to_local().shape[2] == x.to_local().shape[2]


@pytest.mark.spmd(2)
def test_refusals():
    x = lightning_shard.shard(torch.randn(SHAPE), mesh_of(2), 2)
    plain, viewed, leaf = torch.zeros(SHAPE), torch.zeros(SHAPE), nn.Parameter(torch.zeros(SHAPE))
    kept = viewed.flatten()
    saved = torch.ones(SHAPE) * leaf
    saved_by = saved * saved
    array = plain.numpy()
    for refused, reason in (
        (lambda: viewed.__setitem__(slice(None), x), "views"),
        (lambda: viewed[:1].add_(x[:1]), "views"),
        (lambda: plain.add_(x), "views"),
        (lambda: saved.add_(x), "autograd has saved"),
        (lambda: leaf.copy_(x), "leaf"),
        (lambda: torch.zeros(2, 3, 1, 5).__setitem__(slice(None), x[:, :, :1]), "can be split"),
    ):
        with pytest.raises(UnsupportedOperationError, match=reason):
            refused()
    with pytest.raises(UnsupportedOperationError, match="split differently"):
        x[:, :2] = lightning_shard.shard(torch.randn(2, 2, 7, 5), mesh_of(2), 1)
    assert (kept.sum(), array.sum(), saved_by.sum()) == (0, 0, 0)
