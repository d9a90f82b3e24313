"""Convolutions that compute while rows travel: equal to one process, as those that wait."""

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from lightning_shard.domain.halo import overlapping
from lightning_shard.domain.layout import Grid, Layout
from lightning_shard.ops.window.strips import Window, plan_of
from lightning_shard.trainer.profile.traffic import counted
from tests.parity import assert_double_backward, assert_parity, mesh_of

WEIGHT, BIAS = (4, 3, 3, 3), (4,)
# name: function, shapes, dims that are split so that some rows travel
CASES = {
    "padded": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 3, 13, 11), WEIGHT, BIAS]),
    "without_bias": (lambda x, w: F.conv2d(x, w, padding=1), [(1, 3, 10, 14), WEIGHT]),
    "dilated": (
        lambda x, w, b: F.conv2d(x, w, b, 1, 2, 2), [(2, 3, 13, 12), WEIGHT, BIAS]
    ),
    "groups": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2), [(2, 4, 9, 8), (6, 2, 3, 3), (6,)]
    ),
    "strided": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), [(2, 3, 24, 24), WEIGHT, BIAS]),
    "wide": (lambda x, w: F.conv2d(x, w, padding=3), [(2, 3, 9, 8), (4, 3, 7, 7)]),
    "wider_than_parts": (lambda x, w: F.conv2d(x, w, padding=4), [(2, 3, 7, 7), (4, 3, 9, 9)]),
    "same": (lambda x, w: F.conv2d(x, w, padding="same"), [(2, 3, 13, 9), (4, 3, 3, 5)]),
    "1d": (lambda x, w: F.conv1d(x[:, :, :, 0], w, padding=1), [(2, 3, 13, 5), (4, 3, 3)]),
    "3d": (
        lambda x, w: F.conv3d(x, w, padding=1), [(1, 2, 7, 8, 5), (3, 2, 3, 3, 3)]
    ),
}  # fmt: skip
WAITS = {  # parts of the output lie otherwise than those of the input, or there are rows on no rank
    "valid": (lambda x, w: F.conv2d(x, w), [(2, 3, 13, 9), WEIGHT]),
    "even": (lambda x, w: F.conv2d(x, w, padding="same"), [(2, 3, 13, 9), (4, 3, 4, 4)]),
    "empty": (lambda x, w: F.conv2d(x, w, padding=1), [(2, 3, 2, 2), WEIGHT]),
    "unbatched": (lambda x, w: F.conv2d(x[0], w, padding=1), [(2, 3, 13, 9), WEIGHT]),
}


def check(name, dims, mesh, waits=False):
    function, shapes = {**CASES, **WAITS}[name]
    dims = dims[:1] if name == "1d" else dims
    with overlapping("always"):
        assert_parity(function, shapes, {0: dims}, mesh_of(*mesh))
        assert_double_backward(function, shapes, {0: dims}, mesh_of(*mesh))


@pytest.mark.slow
def test_three_ranks(run_each):
    cases = {name: {"name": name, "dims": [2], "mesh": (3,)} for name in {**CASES, **WAITS}}
    run_each(3, check, cases)


@pytest.mark.slow
def test_two_by_two(run_each):
    """With the corners, in one message."""
    names = [name for name in CASES if name != "1d"]
    run_each(4, check, {name: {"name": name, "dims": [2, 3], "mesh": (2, 2)} for name in names})


@pytest.mark.spmd(2)
def test_sends_what_waiting_sends():
    x, w = torch.randn(2, 4, 12, 10), torch.randn(4, 4, 3, 3)
    sent = {}
    for mode in ("always", "never"):
        split = lightning_shard.shard(x.requires_grad_(), mesh_of(2), 2)
        with overlapping(mode), counted() as sent[mode]:
            F.conv2d(split, w, padding=1).to_local().sum().backward()
    assert sent["always"] == sent["never"]
    assert sent["always"].calls == 2


@pytest.mark.spmd(2)
def test_no_gradient_of_the_input_no_message():
    w = torch.randn(4, 4, 3, 3, requires_grad=True)
    split = lightning_shard.shard(torch.randn(2, 4, 12, 10), mesh_of(2), 2)
    with overlapping("always"):
        local = F.conv2d(split, w, padding=1).to_local()
        with counted() as sent:
            local.sum().backward()
    assert sent.calls == 0
    assert w.grad is not None


@pytest.mark.spmd(2)
def test_autocast():
    x, w = torch.randn(2, 4, 12, 10), torch.randn(4, 4, 3, 3, requires_grad=True)
    found = {}
    for mode in ("always", "never"):
        split = lightning_shard.shard(x.clone().requires_grad_(), mesh_of(2), 2)
        with overlapping(mode), torch.autocast("cpu", torch.bfloat16):
            result = F.conv2d(split, w, padding=1).to_local()
        assert result.dtype == torch.bfloat16
        found[mode] = result.float(), *torch.autograd.grad(result.float().square().mean(), w)
    torch.testing.assert_close(found["always"], found["never"], rtol=2e-2, atol=2e-2)


def layout_of(rows, parts, columns=300):
    return Layout.of((1, 3, rows, columns), {2: (0,)}, Grid((parts,), (0,)))


def test_thin_and_small_parts_wait():
    window = (Window(2, 3, 1, 1, 1, 1),)
    assert plan_of(layout_of(64, 2), window, thinner=1) is not None
    assert plan_of(layout_of(6, 2, 9000), window, thinner=1) is None
    assert plan_of(layout_of(64, 2, 8), window, thinner=1) is None
    assert plan_of(layout_of(64, 2), window, thinner=8) is None
    assert plan_of(layout_of(6, 2), window, thinner=0) is not None
    assert plan_of(layout_of(2, 3), window, thinner=0) is None  # a rank has no rows


def test_border_of_the_first_and_of_an_inner_rank():
    window = (Window(2, 3, 1, 1, 1, 1),)
    (strip,) = plan_of(layout_of(64, 2), window, thinner=1).strips
    assert (strip.output, strip.input, strip.kernel) == (((31, 32),), ((32, 33),), ((2, 3),))
    inner = Layout.of((1, 3, 99, 300), {2: (0,)}, Grid((3,), (1,)))
    plan = plan_of(inner, window, thinner=1)
    assert [strip.output for strip in plan.strips] == [((0, 1),), ((32, 33),)]
    assert [strip.kernel for strip in plan.strips] == [((0, 1),), ((2, 3),)]
    assert plan.halo.receives == (((-1, 0),), None, ((33, 34),))


@pytest.mark.spmd(3)
def test_patches_that_lie_on_their_ranks_send_no_message():
    """As of a vision transformer whose rows the ranks divide."""
    whole, weight = torch.randn(2, 3, 12, 8, requires_grad=True), torch.randn(5, 3, 4, 4)
    x = lightning_shard.shard(whole, mesh_of(3), 2)
    with overlapping("always"), counted() as traffic:
        result = F.conv2d(x, weight, stride=4).to_local()
        torch.autograd.grad(result, whole, torch.ones_like(result))
    assert traffic.calls == 0
