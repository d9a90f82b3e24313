"""Replicas whose steps take other branches: right as under DDP, or a sentence on all ranks."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_shard import (
    DisagreementError,
    init_mesh,
    launch,
    parallelize,
    start_process_group,
)
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.fsdp.same_blocks import SameBlocks


class Heads(nn.Module):
    """A head for each kind of sample, in one block, and a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.heads = nn.ModuleList(nn.Linear(3, 5) for _ in range(3))
        self.trunk = nn.Linear(5, 2)
        self.idle = nn.Linear(2, 1)
        self.double()

    def forward(self, x, kind):
        return self.trunk(self.heads[kind](x).tanh())


def samples():
    x = torch.randn(4, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return list(zip(x, (0, 1, 1, 0), strict=True))


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def gradients(module):
    return {
        name: None if p.grad is None else whole(p.grad) for name, p in module.named_parameters()
    }


def alone(steps):
    """The mean gradients of two samples for each step, in one process."""
    module, found = Heads(), []
    for step in range(steps):
        losses = [module(*s).square().mean() for s in samples()[2 * step : 2 * step + 2]]
        module.zero_grad()
        (sum(losses) / 2).backward()
        found.append(gradients(module))
    return found


MODES = pytest.mark.parametrize("mode", ["full", "gradients", "none", "hybrid"])


@pytest.mark.spmd(2)
@MODES
def test_heads_of_one_block(mode):
    """Each replica uses another head, in turns; the third head and a layer are used by none."""
    expected, module = alone(2), Heads()
    sizes = {"replicate": 2, "shard": 1} if mode == "hybrid" else {"data": 2}
    parallelize(module, init_mesh(sizes), options=ShardingOptions(mode))
    for step in range(2):
        module.zero_grad()
        module(*samples()[2 * step + dist.get_rank()]).square().mean().backward()
        found = gradients(module)
        for name, value in expected[step].items():
            if value is None:
                assert found[name] is None, name
            else:
                torch.testing.assert_close(found[name], value)


@pytest.mark.spmd(3)
def test_parameters_smaller_than_the_ranks():
    """Of `trunk.bias` with two numbers one of three ranks has none; no rank forgets alone."""
    module = Heads()
    parallelize(module, init_mesh({"data": 3}))
    module(*samples()[dist.get_rank()]).square().mean().backward()
    without = [name for name, p in module.named_parameters() if p.grad is None]
    assert without == ["heads.2.weight", "heads.2.bias", "idle.weight", "idle.bias"]


@pytest.mark.spmd(2)
def test_nothing_is_sent_where_all_is_used():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    parallelize(module, init_mesh({"data": 2}))
    sent = []
    plain = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *a, **k: (sent.append(a), plain(*a, **k))[1])
        for _ in range(3):
            module(samples()[0][0]).sum().backward()
    assert len(sent) == 1  # after the first backward


@pytest.mark.spmd(2)
def test_accumulated_gradients_stay():
    expected, module = Heads(), Heads()
    parallelize(module, init_mesh({"data": 2}))
    for step in range(2):
        module(*samples()[2 * step + dist.get_rank()]).square().mean().backward()
    for x, kind in samples():
        (expected(x, kind).square().mean() / 2).backward()
    found = gradients(module)
    for name, p in expected.named_parameters():
        assert (p.grad is None) == (found[name] is None)
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad)


class Branches(nn.Module):
    """Blocks of one shape, of which each call runs those that it is told."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.double()

    def forward(self, x, chosen):
        for i in chosen:
            x = self.blocks[i](x).tanh()
        return x


def parallel(module, **options):
    options = {"wrap": ["Linear"]} | options
    parallelize(
        module, init_mesh({"data": 2}), options=ShardingOptions(**{"mode": "full", **options})
    )
    return module


def step(module, chosen, weight=1.0):
    module(samples()[0][0], chosen).square().sum().mul(weight).backward()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("mode", ["full", "gradients", "hybrid"])
def test_ranks_that_change_their_way_alike(mode):
    """Layers are left out by the same draw on all ranks, and evaluation comes between."""
    module, expected = parallel(Branches(), mode=mode), Branches()
    for chosen in ((0, 1, 2, 3), (0, 2), (3, 1), (0, 1, 2, 3), (1, 1)):
        with torch.no_grad():
            module(samples()[0][0], chosen[::-1])
        step(module, chosen)
        step(expected, chosen)
    found = gradients(module)
    for name, p in expected.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


def other_way(rank, first, second):
    """Two steps alike, and one in which the second rank takes another way."""
    module = parallel(Branches())
    for _ in range(2):
        step(module, first)
    step(module, second if rank else first)
    return "went on"


WAYS = {
    "another block": ((0, 1, 3), (0, 2, 3), "gathers 'blocks.2'", "gathers 'blocks.1', as before"),
    "one left out": ((0, 1, 3), (0, 3), "gathers 'blocks.3'", "gathers 'blocks.1', as before"),
    "one more": ((0, 1), (0, 1, 2), "gathers 'blocks.2'", "gathers 'blocks.1', as before"),
}


def launched(first, second):
    start_process_group()
    return other_way(dist.get_rank(), first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "here", "there"), WAYS.values(), ids=WAYS)
def test_a_rank_that_takes_another_way(first, second, here, there):
    """In processes of their own: a rank that waits in a collective is ended."""
    begun = time.monotonic()
    with pytest.raises(ProcessRaisedException) as raised:
        launch(launched, first, second, processes=2, timeout_s=60)
    sentence = f"the ranks run different blocks: rank 1 {here}, where rank 0 {there}; let all"
    assert sentence in str(raised.value)
    assert time.monotonic() - begun < 40


@pytest.mark.spmd(2)
def test_a_way_that_was_taken_before_costs_no_message():
    module, asked = parallel(Branches()), []
    plain = SameBlocks._agree
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SameBlocks, "_agree", lambda *a: (asked.append(a[1]), plain(*a)))
        for _ in range(4):
            seen, asked[:] = list(asked), []
            step(module, (0, 1, 1, 2, 2, 2))
            with torch.no_grad():
                module(samples()[0][0], (0, 1, 2))
        step(module, (0, 1))
    assert not seen  # the way of the steps before
    assert asked  # another one


@pytest.mark.spmd(2)
def test_both_ranks_take_another_way():
    module, rank = parallel(Branches()), dist.get_rank()
    step(module, (0, 1))
    mine, other = (2, 3) if rank == 0 else (3, 2)
    expected = (
        f"rank {rank} gathers 'blocks.{mine}', where rank {1 - rank} gathers 'blocks.{other}'"
    )
    with pytest.raises(DisagreementError, match=expected):
        step(module, (0, mine))


@pytest.mark.spmd(2)
def test_the_way_out_that_the_sentence_names():
    """Each rank runs both blocks, the one that it does not need with a weight of 0."""
    module, expected = Heads(), Heads()
    parallelize(module, init_mesh({"data": 2}), options=ShardingOptions("full", wrap=["Linear"]))
    for n in range(2):
        losses = {}
        for kind in (0, 1):
            x, own = samples()[2 * n + dist.get_rank()]
            losses[kind] = module(x, kind).square().mean() * float(kind == own)
        sum(losses.values()).backward()
        for s in samples()[2 * n : 2 * n + 2]:
            (expected(*s).square().mean() / 2).backward()
    found = gradients(module)
    for name, p in expected.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad)
