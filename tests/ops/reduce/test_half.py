"""Sums of half precision are as exact on ranks and in tiles as torch's, and overflow no earlier.

Torch adds up float16 and bfloat16 in float32. Partial sums that were rounded to half precision
would be infinite in float16, and coarse in both, the more ranks there are.
"""

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from tests.pairs import choose
from tests.parity import mesh_of, tiles_of

LABELS = (torch.arange(300 * 256) % 2).view(1, 300, 256)


def both(x):
    return torch.cat([x / 8, -x / 8], 1)


FUNCTIONS = {
    "mean": lambda x: x.mean(),
    "mean over space": lambda x: x.mean((2, 3)),
    "nanmean": lambda x: (x / 100).nanmean(),
    "sum": lambda x: (x / 1000).sum(),
    "sum of opposites": lambda x: torch.cat([x, -x, x / 1000], 2).sum(),
    "var": lambda x: x.var(),
    "std": lambda x: x.std((2, 3)),
    "norm": lambda x: x.norm(),
    "norm over space": lambda x: torch.linalg.vector_norm(x, dim=(2, 3)),
    "normalize": lambda x: F.normalize(x.flatten(2), dim=-1),
    "cosine": lambda x: F.cosine_similarity(x.flatten(2), x.flatten(2) + 1, dim=-1),
    "distance": lambda x: torch.dist(x, x / 2),
    "distances": lambda x: torch.cdist(x[0, 0, :, :2], x[0, 0, :5, :2]),
    "softmax": lambda x: (x / 100).flatten(2).softmax(-1),
    "log_softmax": lambda x: (x / 100).flatten(2).log_softmax(-1),
    "logsumexp": lambda x: (x / 100).flatten(2).logsumexp(-1),
    "mse": lambda x: F.mse_loss(x, x / 2),
    "l1": lambda x: F.l1_loss(x, x / 2, reduction="mean"),
    "huber": lambda x: F.huber_loss(x, x / 2),
    "cross entropy": lambda x: F.cross_entropy(both(x), LABELS),
    "weighted cross entropy": lambda x: F.cross_entropy(
        both(x), LABELS, torch.tensor([1, 3], dtype=x.dtype)
    ),
    "gaussian": lambda x: F.gaussian_nll_loss(x, x / 2, x.abs() + 1),
    "pooled": lambda x: F.adaptive_avg_pool2d(x, (1, 3)),
    "product of matrices": lambda x: (x[0, 0].T / 100) @ x[0, 0],
    "largest": lambda x: x.amax((2, 3)),
    "sums of opposites": lambda x: torch.cat([x, -x], 2).cumsum(2)[:, :, -5:],
    "products up to each": lambda x: (1 + x / 1000).cumprod(2),
    "product": lambda x: torch.cat([x.abs()[:, :, :9] + 1, 1 / (x.abs()[:, :, :9] + 1)], 2).prod(2),
    "rows added": lambda x: torch.zeros_like(x[0, 0, :3]).index_add(
        0, torch.arange(600) % 3, torch.cat([x[0, 0], -x[0, 0]])
    ),
    "elements added": lambda x: torch.zeros(3, 256, dtype=x.dtype).scatter_reduce(
        0, (torch.arange(600) % 3)[:, None].expand(600, 256), torch.cat([x[0, 0], -x[0, 0]]), "sum"
    ),
}


def value_and_gradient(function, x):
    x = x.detach().requires_grad_()
    value = lightning_shard.gather(function(x))
    (gradient,) = torch.autograd.grad(value.float().square().mean(), x)
    return value.detach().double(), lightning_shard.gather(gradient).double()


def check(function, dtype, shard):
    x = 5 + 3 * torch.randn(1, 1, 300, 256, generator=torch.Generator().manual_seed(2))
    x = x.to(dtype)
    exact = value_and_gradient(function, x.double())
    plain = value_and_gradient(function, x)
    found = value_and_gradient(function, shard(x))
    for mine, torchs, correct in zip(found, plain, exact, strict=True):
        rounding = torch.finfo(dtype).eps * correct.abs().max() + torch.finfo(dtype).smallest_normal
        error = (torchs - correct).abs().max().nan_to_num(0, 0)  # torch's own may overflow
        assert (mine - correct).abs().max() < 2 * error + 2 * rounding


DTYPES = torch.float16, torch.bfloat16


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("name", "dtype"), choose(FUNCTIONS, DTYPES), ids=str)
def test_on_ranks(name, dtype):
    check(FUNCTIONS[name], dtype, lambda x: lightning_shard.shard(x, mesh_of(3), 2))


@pytest.mark.parametrize(("name", "dtype"), choose(FUNCTIONS, DTYPES, every=3), ids=str)
def test_in_tiles(name, dtype):
    check(FUNCTIONS[name], dtype, lambda x: lightning_shard.shard(x, tiles_of(3), 2))


WEIGHTED = {
    "convolution": lambda x, w: F.conv2d(x, w.view(4, 4, 1, 1).expand(4, 4, 3, 1), padding=(1, 0)),
    "linear": lambda x, w: F.linear(x.movedim(1, -1), w.view(4, 4)),
    "factor": lambda x, w: x * w.view(4, 4).sum(1).view(4, 1, 1),
}


@pytest.mark.parametrize(("name", "dtype"), choose(WEIGHTED, DTYPES), ids=str)
def test_gradients_of_weights_add_up_over_many_tiles(name, dtype):
    """A sum in half precision of 128 equal parts loses digits with each of them."""
    gradients = []
    for kind, tiles in ((torch.float64, 0), (dtype, 128)):
        x = torch.linspace(0.5, 1.5, 4 * 256 * 16).view(1, 4, 256, 16).to(dtype).to(kind)
        w = torch.linspace(1, 2, 16).to(dtype).to(kind).requires_grad_()
        y = WEIGHTED[name](lightning_shard.shard(x, tiles_of(tiles), 2) if tiles else x, w)
        loss = lightning_shard.gather(y).to(torch.float64).mean()
        gradients.append(torch.autograd.grad(loss, w)[0].double())
    error = (gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max()
    assert error < 2 * torch.finfo(dtype).eps
