"""How many kernels and calls of Python a split function takes: on a GPU each is idle hardware."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_shard
from benchmarks.gpu_speed import FAMILIES, Launches, families
from benchmarks.networks import NETWORKS, UNet, ViT
from lightning_shard.domain.halo import overlapping
from tests.parity import mesh_of

# name: function, shape of the weight, how convolutions wait, kernels forward and backward
CASES = {
    # the rows that travel, the message, the rank's rows, those of the other, and their sum
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), (8, 8, 3, 3), "always", 5, 5),
    # the same, but the rows side by side and the zeros around them in the place of a sum
    "waiting": (lambda x, w: F.conv2d(x, w, padding=1), (8, 8, 3, 3), "never", 5, 6),
    "group norm": (lambda x, w: F.group_norm(x, 2, w), (8,), "auto", 9, 11),
    "batch norm": (
        lambda x, w: F.batch_norm(x, None, None, w, training=True), (8,), "auto", 8, 10
    ),
}  # fmt: skip


def seen_in_a_step(mode, net, field):
    """What a mode has seen in the second step; the first makes constants."""
    for _ in range(2):
        with mode() as seeing:
            net(field).square().mean().backward()
    return seeing.seen


ONE_RANK = 1.6  # times the kernels of a plain step, at most


@pytest.mark.spmd(1)
def test_a_step_of_a_unet_on_one_rank_starts_few_kernels_more():
    """What is split over one rank is whole: no norm and no halo of its own."""
    torch.manual_seed(0)
    net, whole = UNet(8), torch.randn(1, 3, 32, 32)
    fields = whole, lightning_shard.shard(whole, mesh_of(1), 2)
    plain, split = (families(seen_in_a_step(Launches, net, field)) for field in fields)
    assert split.total() <= ONE_RANK * plain.total(), (plain, split)
    grown = {family for family in FAMILIES if split[family] > plain[family]}
    assert not grown, (plain, split)


# name: network, calls of Python for each torch function of a step beside those of a plain field
CALLS = {"U-Net": (lambda: UNet(8), 130), "ViT": (ViT, 100)}


@pytest.mark.spmd(1)
@pytest.mark.parametrize("name", CALLS)
def test_a_split_function_takes_few_calls_of_python(name):
    torch.manual_seed(0)
    make, most = CALLS[name]
    net, whole = make(), torch.randn(1, 3, 32, 32)
    split = lightning_shard.shard(whole, mesh_of(1), 2)
    functions, counts = 0, []
    for field in (whole, split):
        for _ in range(3):  # the first ones decide and make constants
            counts.append(0)

            def count(frame, event, of):
                nonlocal functions
                counts[-1] += event in ("call", "c_call")
                is_split = event == "call" and frame.f_code.co_name == "__torch_function__"
                functions += is_split and len(counts) == 6

            sys.setprofile(count)
            try:
                net(field).square().mean().backward()
            finally:
                sys.setprofile(None)
    plain, ours = counts[2], counts[5]
    assert functions > 40
    assert ours - plain <= most * functions, (plain, ours, functions)


class _Calls(TorchDispatchMode):
    """Counts the operators of torch that are called, also views and bare memory."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


# name: network, operators of a step of two ranks for each operator of a plain one
OPERATORS = {"U-Net": (lambda: UNet(8), 3.7), "ResNet50": (NETWORKS["ResNet50"], 3.9)}


@pytest.mark.quick_rows("U-Net")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_step_of_two_ranks_calls_few_operators(name):
    """The price of each is time of the processor, whatever the field's size."""
    torch.manual_seed(0)
    make, most = OPERATORS[name]
    net, whole = make(), torch.randn(1, 3, 64, 64)
    fields = whole, lightning_shard.shard(whole, mesh_of(2), 2)
    with overlapping("always"):
        plain, split = (seen_in_a_step(_Calls, net, field) for field in fields)
    assert split <= most * plain, (plain, split)


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
