"""Gradients of a rank without rows: each has memory of its own, since they are summed in place."""

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from tests.parity import mesh_of

CASES = {
    "convolution": (lambda x, w, b: F.conv1d(x, w, b), (1, 1, 1)),
    "group norm": (lambda x, w, b: F.group_norm(x, 1, w.flatten(), b, 0.5), (1, 1, 2)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (1,), w.flatten(), b), (1, 1, 1)),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w.flatten(), b, training=True),
        (2, 1, 1),
    ),
    "linear": (lambda x, w, b: F.linear(x, w[0], b), (1, 1, 1)),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", CASES)
def test_gradients_share_no_memory(name):
    function, shape = CASES[name]
    x = lightning_shard.shard(
        torch.randn(shape, dtype=torch.float64), mesh_of(3), 0 if shape[2] == 1 else 2
    )
    w = torch.ones(1, 1, 1, dtype=torch.float64, requires_grad=True)
    b = torch.ones(1, dtype=torch.float64, requires_grad=True)
    loss = lightning_shard.gather(function(x, w, b)).square().sum()
    gradients = torch.autograd.grad(loss, (w, b))
    assert len({g.data_ptr() for g in gradients}) == len(gradients)
