import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lightning_shard
from lightning_shard.trainer.profile.traffic import counted
from tests.ops.norm.test_batch_norm import CASES
from tests.parity import assert_parity, mesh_of

NORMS = ["batch_norm", "group_norm", "instance_norm", "layer_norm_two"]


def operands(case, **memory):
    torch.manual_seed(1)
    tensors = [torch.randn(shape, dtype=torch.float64) + 1 for shape in CASES[case][1]]
    tensors[0] = tensors[0].clone(**memory)
    return [t.requires_grad_() for t in tensors]


@pytest.mark.spmd(3)
@pytest.mark.parametrize("case", NORMS)
def test_the_formula_has_the_gradients_of_the_kernels(case):
    function, given = CASES[case][0], operands(case)
    result = function(lightning_shard.shard(given[0], mesh_of(3), 2), *given[1:])
    loss = lightning_shard.gather(result).square().sin().sum()
    fused = torch.autograd.grad(loss, given, retain_graph=True)
    again = torch.autograd.grad(loss, given, create_graph=True)
    torch.testing.assert_close(again, fused)
    assert all(gradient.requires_grad for gradient in again)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("case", NORMS)
def test_channels_last(case):
    function, given = CASES[case][0], operands(case, memory_format=torch.channels_last)
    expected = function(*given)
    split = lightning_shard.shard(given[0], mesh_of(3), 2)
    result = lightning_shard.gather(function(split, *given[1:]))
    torch.testing.assert_close(result, expected)
    wanted = torch.autograd.grad(expected.square().sin().sum(), given)
    found = torch.autograd.grad(result.square().sin().sum(), given)
    for gradient, value in zip(found, wanted, strict=True):
        dist.all_reduce(total := gradient.contiguous() / 3)
        torch.testing.assert_close(total, value.contiguous())


@pytest.mark.spmd(2)
@pytest.mark.parametrize("case", NORMS)
def test_one_collective_each_way(case):
    function, given = CASES[case][0], operands(case)
    split = lightning_shard.shard(given[0], mesh_of(2), 2)
    with counted() as forward:
        result = function(split, *given[1:])
    local = result.to_local()
    with counted() as backward:
        torch.autograd.grad(local, given, torch.ones_like(local))
    assert (forward.calls, backward.calls) == (1, 1)


@pytest.mark.spmd(2)
def test_values_far_from_zero():
    x = torch.randn(2, 4, 6, 5) + 3000
    result = F.group_norm(lightning_shard.shard(x, mesh_of(2), 2), 2)
    expected = F.group_norm(x.double(), 2).float()
    torch.testing.assert_close(lightning_shard.gather(result), expected, rtol=0, atol=2e-3)


@pytest.mark.spmd(3)
def test_no_samples_have_gradients_without_numbers():
    """As of a mask that chooses none of the samples of a batch."""

    def function(x, weight, bias):
        return F.batch_norm(x, None, None, weight, bias, training=True)

    shapes = [(0, 4, 7, 6), (4,), (4,)]
    assert_parity(function, shapes, {0: [2]}, mesh_of(3))
