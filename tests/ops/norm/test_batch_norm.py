import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lightning_shard
from lightning_shard.domain.errors import UnsupportedOperationError
from tests.pairs import choose
from tests.parity import (
    assert_double_backward,
    assert_parity,
    assert_parity_of_module,
    assert_same,
    mesh_of,
    tiles_of,
)

IMAGE = (2, 4, 7, 5)
CASES = {
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [IMAGE, (4,), (4,)]),
    "batch_norm_eps": (lambda x: F.batch_norm(x, None, None, None, None, True, eps=0.1), [IMAGE]),
    "batch_norm_bias": (lambda x, b: F.batch_norm(x, None, None, None, b, True), [IMAGE, (4,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [IMAGE, (4,), (4,)]),
    "group_norm_of_torch": (lambda x, w, b: torch.group_norm(x, 2, w, b), [IMAGE, (4,), (4,)]),
    "layer_norm_of_torch": (lambda x: torch.layer_norm(x, (7, 5)), [IMAGE]),
    "group_norm_all": (lambda x: F.group_norm(x, 1, eps=0.1), [IMAGE]),
    "group_norm_negative_eps": (lambda x: F.group_norm(x * 9, 2, eps=-0.5), [IMAGE]),
    "group_norm_each": (lambda x, w: F.group_norm(x, 4, w), [IMAGE, (4,)]),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), [IMAGE, (4,), (4,)]),
    "layer_norm_last": (lambda x, w, b: F.layer_norm(x, (5,), w, b), [IMAGE, (5,), (5,)]),
    "layer_norm_two": (lambda x, w, b: F.layer_norm(x, (7, 5), w, b), [IMAGE, (7, 5), (7, 5)]),
    "layer_norm_image": (lambda x, w: F.layer_norm(x, IMAGE[1:], w), [IMAGE, IMAGE[1:]]),
    "layer_norm_plain": (lambda x: F.layer_norm(x, (7, 5), eps=0.1), [IMAGE]),
    "rms_norm_last": (lambda x, w: F.rms_norm(x, (5,), w), [IMAGE, (5,)]),
    "rms_norm_two": (lambda x, w: F.rms_norm(x, (7, 5), w, eps=0.1), [IMAGE, (7, 5)]),
    "response": (lambda x: F.local_response_norm(x, 3, alpha=0.5), [IMAGE]),
    "response_even": (lambda x: F.local_response_norm(x, 2, alpha=0.5, k=2.0), [IMAGE]),
    "normalize": (lambda x: F.normalize(x), [IMAGE]),
    "normalize_rows": (lambda x: F.normalize(x, dim=2), [IMAGE]),
    "normalize_both": (lambda x: F.normalize(x, 3, dim=(2, 3)), [IMAGE]),
    "normalize_zero": (lambda x: F.normalize(x * torch.zeros(4, 1, 1), dim=(2, 3)), [IMAGE]),
}  # fmt: skip
SMOOTH = ["batch_norm", "group_norm", "layer_norm_two", "rms_norm_two", "normalize_both"]


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("case", "dims"),
    choose(
        ["batch_norm", "instance_norm", "layer_norm_image", "response", "response_even"],
        [[0, 2], [3, 1]],
    ),
)
def test_split_batch_and_channels(case, dims):
    function, shapes = CASES[case]
    assert_parity(function, shapes, {0: dims}, mesh_of(2, 2))


TINY = {
    "batch_norm": (CASES["batch_norm"][0], [(2, 4, 3, 2), (4,), (4,)]),
    "batch_norm_vector": (CASES["batch_norm"][0], [(2, 4, 2), (4,), (4,)]),
    "group_norm": (CASES["group_norm"][0], [(2, 4, 3), (4,), (4,)]),
    "one_group_of_one_sample": (lambda x, w: F.group_norm(x, 1, w), [(1, 32, 6), (32,)]),
    "instance_norm": (CASES["instance_norm"][0], [(2, 4, 2), (4,), (4,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4, 3), w, b), [(2, 4, 3), (4, 3), (4, 3)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4, 3), w), [(2, 4, 3), (4, 3)]),
    "response": (CASES["response"][0], [(2, 4, 3)]),
    "normalize": (lambda x: F.normalize(x, dim=2), [(2, 4, 3)]),
    "eval": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double() * 2, w, b),
        [(2, 4, 3), (4,), (4,)],
    ),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dims", [[0], [2], [3]], ids=str)
def test_frozen_statistics_of_one_row_whose_gradient_lies_in_another_order(dims):
    """Of one row torch's kernel takes the order of values from strides that say nothing."""

    def function(x, weight, bias):
        mean = torch.linspace(-1, 1, 4, dtype=torch.float64)
        y = F.batch_norm(x, mean, mean.exp(), weight, bias)
        return y.transpose(1, 3) @ mean.outer(mean.cos())

    for mesh in (mesh_of(3), tiles_of(3), tiles_of(1)):
        assert_parity(function, [(2, 4, 3, 3), (4,), (4,)], {0: dims}, mesh)


def test_instance_norm_in_one_tile_whose_gradient_lies_by_channels_last():
    """Torch's own is wrong then, where a tile's gradient may lie otherwise than that of a field."""
    field, weights = torch.randn(2, 1, 4, 3, 5).double()
    weights = weights.contiguous(memory_format=torch.channels_last)
    whole, tile = field.clone().requires_grad_(), field.clone().requires_grad_()
    (F.group_norm(whole, 4) * weights).sum().backward()
    (F.instance_norm(lightning_shard.shard(tile, tiles_of(1), 2)) * weights).sum().backward()
    assert_same(tile.grad, whole.grad)


@pytest.mark.spmd(3)
def test_second_gradients_of_response_norm_on_a_rank_without_rows():
    """The sum has no curvature of its own, so the rank must have that of the norm."""
    field = torch.randn(2, 4, 2, 3, dtype=torch.float64)
    found: list[torch.Tensor] = []
    for given in (field, lightning_shard.shard(field, mesh_of(3), 2)):
        x = given.clone().requires_grad_()
        loss = F.local_response_norm(x, 3, alpha=0.5).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), x)
    assert_same(lightning_shard.gather(found[1]), found[0])


@pytest.mark.spmd(4)
@pytest.mark.parametrize("case", TINY)
def test_fewer_rows_than_ranks(case):
    function, shapes = TINY[case]
    assert_parity(function, shapes, {0: [2]}, mesh_of(4))


@pytest.mark.spmd(3)
@pytest.mark.parametrize(
    "case", ["batch_norm", "group_norm", "instance_norm", "layer_norm_two", "rms_norm_two"]
)
def test_single_precision(case):
    function, shapes = CASES[case]
    assert_parity(function, shapes, {0: [2]}, mesh_of(3), dtype=torch.float32)


@pytest.mark.spmd(3)
@pytest.mark.parametrize(
    ("case", "dtype"),
    choose(
        ["batch_norm", "group_norm", "layer_norm_two", "rms_norm_two"],
        [torch.bfloat16, torch.float16],
    ),
)
def test_half_precision(case, dtype):
    """Statistics in float32: a mean of 100 leaves two digits of the spread, as in one process."""
    function, shapes = CASES[case]
    torch.manual_seed(1)
    x, *rest = [torch.randn(s).to(dtype) for s in shapes]
    x = x + 10
    expected = function(x, *rest)
    result = function(lightning_shard.shard(x, mesh_of(3), 2), *rest)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(lightning_shard.gather(result), expected, rtol=0.1, atol=0.1)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("case", ["batch_norm", "group_norm", "instance_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept_for_backward_as_it_is(case, dtype):
    """Not in float32, which takes twice the memory; parameters are in float32, as in autocast."""
    function, shapes = CASES[case]
    torch.manual_seed(1)
    x, *rest = [torch.randn(s) for s in shapes]
    whole = x.to(dtype).requires_grad_()
    field = lightning_shard.shard(x.to(dtype), mesh_of(2), 2).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        result = function(field, *rest)
    assert sum(t.nbytes for t in kept if t.numel() > 16) <= x[:, :, :4].numel() * dtype.itemsize
    (result * lightning_shard.shard(x, mesh_of(2), 2)).sum().backward()
    (function(whole, *rest) * x).sum().backward()
    gradient = lightning_shard.gather(field.grad)
    torch.testing.assert_close(gradient, whole.grad, rtol=0.02, atol=0.02)


def modules():
    return {
        "batch_norm": nn.BatchNorm2d(4),
        "batch_norm_average": nn.BatchNorm2d(4, momentum=None),
        "batch_norm_untracked": nn.BatchNorm2d(4, track_running_stats=False),
        "instance_norm": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        "group_norm": nn.GroupNorm(2, 4),
        "layer_norm": nn.LayerNorm((7, 5)),
        "rms_norm": nn.RMSNorm((7, 5)),
        "response": nn.LocalResponseNorm(2),
    }


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("name", "training"), choose(modules(), [True, False]))
def test_module(name, training):
    module = modules()[name].double().train(training)
    assert_parity_of_module(module, IMAGE, [2], mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("name", "dims"),
    choose(["batch_norm", "batch_norm_average", "instance_norm"], [[2, 3], [0, 2], [1, 2]]),
)
def test_running_buffers(name, dims):
    plain = modules()[name].double()
    split = copy.deepcopy(plain)
    for _ in range(3):
        x = torch.randn(IMAGE, dtype=torch.float64) + 1
        plain(x)
        split(lightning_shard.shard(x, mesh_of(2, 2), dims))
    for (key, value), other in zip(plain.named_buffers(), split.buffers(), strict=True):
        torch.testing.assert_close(other, value, msg=lambda m, key=key: f"{key}: {m}")
    plain.eval(), split.eval()
    x = torch.randn(IMAGE, dtype=torch.float64)
    result = split(lightning_shard.shard(x, mesh_of(2, 2), dims))
    torch.testing.assert_close(lightning_shard.gather(result), plain(x))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("norm", [F.instance_norm, F.group_norm])
def test_second_gradients_where_a_rank_has_no_sample(norm):
    """Also of the weights, whose gradient there must have a graph as on the other ranks."""

    def function(x, weight, bias):
        if norm is F.group_norm:
            return F.group_norm(x, 2, weight, bias)
        return F.instance_norm(x, weight=weight, bias=bias)

    assert_double_backward(function, [(2, 4, 3), (4,), (4,)], {0: [0]}, mesh_of(3))


@pytest.mark.spmd(3)
def test_statistics_first_used_in_inference_mode():
    module = nn.BatchNorm2d(4).double()
    x = torch.randn(3, 4, 11, 6, dtype=torch.float64)
    with torch.inference_mode():
        module(lightning_shard.shard(x, mesh_of(3), 2))
    module(lightning_shard.shard(x, mesh_of(3), 2)).sum().backward()
    assert module.weight.grad is not None


@pytest.mark.spmd(3)
@pytest.mark.parametrize("norm", ["batch", "instance", "group", "layer"])
def test_a_variance_that_overflows(norm):
    """As of fields with fill values: what is normalized is 0, as in torch, and not NaN."""
    functions = {
        "batch": lambda x: F.batch_norm(x, None, None, training=True),
        "instance": F.instance_norm,
        "group": lambda x: F.group_norm(x, 2),
        "layer": lambda x: F.layer_norm(x, (9, 5)),
    }
    x = torch.randn(2, 4, 9, 5)
    x[:, :, 4:6] = 1e20
    leaf = x.clone().requires_grad_()
    whole = lightning_shard.gather(functions[norm](lightning_shard.shard(leaf, mesh_of(3), 2)))
    assert torch.equal(whole.detach(), functions[norm](x))
    assert torch.equal(torch.autograd.grad(whole.sum(), leaf)[0], torch.zeros_like(x))


@pytest.mark.spmd(3)
def test_refusals():
    x = torch.randn(IMAGE)
    with pytest.raises(UnsupportedOperationError, match="split channels"):
        F.group_norm(lightning_shard.shard(x, mesh_of(3), 1), 2)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(
            lightning_shard.shard(x[:1, :, :1, :1], mesh_of(3), 2), None, None, training=True
        )
    with pytest.raises(RuntimeError, match="divisible by num_groups"):
        F.group_norm(lightning_shard.shard(x, mesh_of(3), 2), 3)


@pytest.mark.spmd(2)
def test_one_sample_whose_gradient_lies_transposed_in_memory():
    """Where torch's own backward on the CPU is wrong (2.11 to 2.15): the oracle is the formula."""

    def formula(x, w):
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
        return w @ ((x - mean) * (variance + 1e-5).rsqrt()).flatten(2).transpose(1, 2)

    def function(x, w):
        if type(x) is torch.Tensor:
            return formula(x, w)
        return w @ F.batch_norm(x, None, None, training=True).flatten(2).transpose(1, 2)

    assert_parity(function, [(1, 3, 5, 4), (1, 2, 20)], {0: [2]}, mesh_of(2))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("reentrant", [True, False])
def test_running_statistics_of_a_block_that_ends_with_the_norm_and_runs_again(kind, reentrant):
    """Without re-entrance torch ends the second run as autograd keeps the last of its tensors."""
    x = torch.randn(IMAGE, dtype=torch.float64)
    norms = [kind(4, track_running_stats=True).double() for _ in range(2)]
    for norm, field in zip(norms, (x, lightning_shard.shard(x, mesh_of(2), 2)), strict=True):
        y = field.clone().requires_grad_()
        checkpoint(norm, y, use_reentrant=reentrant).square().mean().backward()
    torch.testing.assert_close(norms[1].state_dict(), norms[0].state_dict())
