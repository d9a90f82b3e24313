"""Softmax, logsumexp and cumulative functions over split and whole dims."""

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from tests.parity import mesh_of

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
