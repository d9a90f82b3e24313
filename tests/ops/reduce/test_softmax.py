"""Softmax, logsumexp and cumulative functions over split and whole dims."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lightning_shard
from tests.parity import mesh_of, tiles_of

SHAPE = (2, 3, 7, 3)


def masked(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill((torch.arange(7)[:, None] + torch.arange(3)) % 3 == 0, -torch.inf)


CASES = {
    "softmax_2": (lambda x: F.softmax(x, 2), [SHAPE]),
    "softmax_last": (lambda x: x.softmax(dim=-1), [SHAPE]),
    "softmax_channels": (lambda x: torch.softmax(x, axis=1), [SHAPE]),
    "softmax_dtype": (lambda x: torch.softmax(x.detach().float(), 2, torch.float64), [SHAPE]),
    "softmax_masked": (lambda x: masked(x).softmax(3), [SHAPE]),
    "softmin": (lambda x: F.softmin(x, dim=2), [SHAPE]),
    "log_softmax_2": (lambda x: F.log_softmax(x, dim=2), [SHAPE]),
    "log_softmax_3": (lambda x: torch.log_softmax(1000 * x, 3), [SHAPE]),
    "logsumexp": (lambda x: torch.logsumexp(x, 2), [SHAPE]),
    "logsumexp_dims": (lambda x: x.logsumexp((2, 3), keepdim=True), [SHAPE]),
    "logsumexp_masked": (lambda x: masked(x).logsumexp(2), [SHAPE]),
    "cumsum_2": (lambda x: x.cumsum(2), [SHAPE]),
    "cumsum_3": (lambda x: torch.cumsum(x, dim=3), [SHAPE]),
    "cumprod": (lambda x: torch.cumprod(x, 2), [SHAPE]),
    "cumprod_zero": (lambda x: torch.cumprod(x * (torch.arange(7) != 3)[:, None], 2), [SHAPE]),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 2), [SHAPE]),
}
SMOOTH = [
    "softmax_2",
    "softmax_last",
    "log_softmax_2",
    "logsumexp_dims",
    "cumsum_2",
    "cumprod",
    "logcumsumexp",
]


@pytest.mark.spmd(3)
def test_refusals():
    x = torch.randn(SHAPE)
    split = lightning_shard.shard(x, mesh_of(3), 2)
    with pytest.raises(lightning_shard.UnsupportedOperationError, match="name it"):
        F.softmax(split)


def check_cumulative_logarithms(where):
    """Where the loss leaves rows out, and where rows of a rank are probabilities of 0."""
    x = torch.randn(6, 2, dtype=torch.float64)
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0], dtype=torch.float64)[:, None]
    for start, twice in ((x, True), (x.masked_fill(mask == 0, -torch.inf), False)):
        found = []
        for y in (start.clone(), lightning_shard.shard(start.clone(), where, 0)):
            y.requires_grad_()
            loss = (y.logcumsumexp(0) * mask).sum()
            (gradient,) = torch.autograd.grad(loss, y, create_graph=twice)
            if twice:
                (gradient,) = torch.autograd.grad(gradient.square().sum(), y)
            found.append(gradient if y is start else lightning_shard.gather(gradient))
        assert found[0].isfinite().all()
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-14)


@pytest.mark.spmd(3)
def test_cumulative_logarithms_of_what_a_mask_leaves_out():
    torch.manual_seed(0)
    check_cumulative_logarithms(mesh_of(3))


def test_cumulative_logarithms_in_tiles():
    torch.manual_seed(0)
    check_cumulative_logarithms(tiles_of(3))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_the_gradient_beside_an_infinity_and_large_numbers(value):
    x = torch.randn(7, 2, dtype=torch.float64) * 1e6
    x[3, 0] = value
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    split = lightning_shard.shard(leaves[1], mesh_of(3), 0)
    expected, found = leaves[0].logsumexp(0), split.logsumexp(0)
    torch.testing.assert_close(found, expected)
    (wanted,) = torch.autograd.grad(expected.sum(), leaves[0])
    (gradient,) = torch.autograd.grad(found.sum(), leaves[1])
    dist.all_reduce(gradient)
    torch.testing.assert_close(gradient / 3, wanted, equal_nan=True)
