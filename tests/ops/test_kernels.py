"""How many kernels a split function starts: on a GPU each is idle hardware, however small it is."""

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from benchmarks.gpu_speed import Launches
from lightning_shard.domain.halo import overlapping
from tests.parity import mesh_of

# name: function, shape of the weight, how convolutions wait, kernels forward and backward
CASES = {
    # the rows that travel, the message, the rank's rows, those of the other, and their sum
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), (8, 8, 3, 3), "always", 5, 5),
    # the same, but the rows side by side and the zeros around them in the place of a sum
    "waiting": (lambda x, w: F.conv2d(x, w, padding=1), (8, 8, 3, 3), "never", 5, 6),
    "group norm": (lambda x, w: F.group_norm(x, 2, w), (8,), "auto", 9, 12),
    "batch norm": (
        lambda x, w: F.batch_norm(x, None, None, w, training=True), (8,), "auto", 8, 12
    ),
}  # fmt: skip


@pytest.mark.spmd(2)
@pytest.mark.parametrize("case", CASES)
def test_no_more_kernels(case):
    function, shape, mode, forward, backward = CASES[case]
    whole, weight = torch.randn(1, 8, 12, 10), torch.ones(shape, requires_grad=True)
    local = lightning_shard.shard(whole, mesh_of(2), 2).to_local().clone().requires_grad_()
    x = lightning_shard.from_local(local, mesh_of(2), 2, whole.shape)
    before = after = Launches()
    for _ in range(2):  # the first makes constants
        before, after = Launches(), Launches()
        with overlapping(mode), before:
            result = function(x, weight).to_local()
        with after:
            torch.autograd.grad(result, (local, weight), torch.ones_like(result))
    assert before.seen.total() <= forward, before.seen
    assert after.seen.total() - 1 <= backward, after.seen  # but for the ones
