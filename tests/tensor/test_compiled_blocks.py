"""Blocks that are compiled with their collectives: the same numbers as without the compiler.

The backend of most tests traces, decomposes and divides graphs as the compiler does, and runs
torch's kernels; the slow tests have the compiler itself.
"""

import contextlib
import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from neuralop.layers.fno_block import FNOBlocks
from torch import nn

import lightning_shard
from lightning_shard import ShardingOptions, UnsupportedOperationError
from lightning_shard.domain import wire
from lightning_shard.fsdp.shard_block import shard_block
from lightning_shard.memory.neuralop.layers import avoid_whole_fields
from lightning_shard.processes.torch_private.internals import keep_in_order
from lightning_shard.tensor import compiled
from lightning_shard.tensor.compiled import CompiledBlock
from lightning_shard.trainer.profile.traffic import counted
from tests.double_fno import to_double
from tests.parity import mesh_of


class Residual(nn.Module):
    def __init__(self, channels=4, norm: Any = nn.BatchNorm2d):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = norm(channels)
        self.second = nn.Conv2d(channels, channels, 5, padding=2)

    def forward(self, x):
        return x + 0.5 * self.second(F.gelu(self.norm(self.first(x))))


class Level(nn.Module):
    """Down and up, with a skip, as in a U-Net; takes and gives several tensors."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 2, 2)

    def forward(self, x, *, skip, scale=2):
        low = F.max_pool2d(self.down(x).relu(), 3, 1, 1)
        high = F.interpolate(self.up(low), size=x.shape[2:], mode="bilinear")
        return {"low": low, "high": torch.cat([high, skip], 1) * scale}


class Attention(nn.Module):
    """Over rows and columns, as in a vision transformer."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        y = self.norm(tokens)
        return tokens + self.attention(y, y, y, need_weights=False)[0]


def group_norm(channels):
    return nn.GroupNorm(2, channels)


BLOCKS = {
    "conv and batch norm": Residual,
    "conv and group norm": lambda: Residual(norm=group_norm),
    "instance norm": lambda: Residual(norm=nn.InstanceNorm2d),
    "level of a U-Net": Level,
    "attention": Attention,
    "FNO": lambda: FNOBlocks(4, 4, (6, 4), n_layers=1),
}


def run(block, fields):
    """Results and gradients, all of this rank."""
    x = fields.detach().clone().requires_grad_()
    results = block(x, skip=x.sin()) if isinstance(block, Level) else block(x)
    results = [*results.values()] if isinstance(results, dict) else [results]
    torch.stack([r.square().mean() for r in results]).sum().backward()
    found = [lightning_shard.gather(r).detach() for r in results]
    return [*found, x.grad.to_local(), *(p.grad for p in block.parameters()), *block.buffers()]


AS_COMPILER = "aot_eager_decomp_partition"


def check(name, sizes, backend=AS_COMPILER, rows=13, stored=torch.contiguous_format):
    torch.manual_seed(3)
    block = to_double(BLOCKS[name]()).to(memory_format=stored)
    avoid_whole_fields(block)  # as the strategy does
    plain, again = copy.deepcopy(block), copy.deepcopy(block)
    x = torch.randn(2, 4, rows, 10, dtype=torch.float64).to(memory_format=stored)
    fields = lightning_shard.shard(x, mesh_of(*sizes), range(2, 2 + len(sizes)))
    forget()
    for each in (block, again):
        each.forward = CompiledBlock(each, each.forward, backend)
    for _ in range(2):
        for each in (block, again):
            each.zero_grad()
            plain.zero_grad()
        with counted() as traffic:
            wanted = run(plain, fields)
        for each in (block, again):
            with counted() as compiled_traffic:
                results = run(each, fields)
            assert compiled_traffic == traffic
            for found, value in zip(results, wanted, strict=True):
                torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)
    (region,) = compiled._REGIONS.values()  # of both blocks
    assert region.call is not None
    assert not region.refused


def forget():
    torch._dynamo.reset()
    compiled._REGIONS.clear()
    compiled._LAYOUTS.clear()


blocks = pytest.mark.parametrize("name", BLOCKS)


FEW = ["FNO", "attention"]  # others are slow: each rank compiles


@pytest.mark.quick_rows("attention")
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in BLOCKS]
)
def test_two_ranks(name):
    check(name, (2,))


IN_TWO_DIMS = ["level of a U-Net", "FNO"]


@pytest.mark.slow
@pytest.mark.spmd(4)
@blocks
def test_two_by_two(name):
    check(name, (2, 2))


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_more_ranks_than_rows():
    """A rank without rows takes part in every exchange of the others."""
    check("level of a U-Net", (3,), rows=2)


@pytest.mark.slow
@pytest.mark.spmd(2)
@blocks
def test_the_compiler_itself(name):
    check(name, (2,), "inductor")


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_the_compiler_itself_with_more_ranks_than_rows():
    check("level of a U-Net", (3,), "inductor", rows=2)


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", IN_TWO_DIMS)
def test_the_compiler_itself_on_two_by_two(name):
    check(name, (2, 2), "inductor")


@pytest.mark.slow
@pytest.mark.spmd(3)
@pytest.mark.parametrize("backend", [AS_COMPILER, "inductor"])
@pytest.mark.parametrize("name", ["conv and batch norm", "conv and group norm", "level of a U-Net"])
def test_channels_last(name, backend):
    check(name, (3,), backend, stored=torch.channels_last)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_a_graph_that_lost_a_collective_is_refused():
    """Without effects, backward's exchanges of nothing move into forward, and all ranks see it."""
    block = to_double(Level())
    forget()
    x = torch.randn(2, 4, 13, 10, dtype=torch.float64)
    fields = lightning_shard.shard(x, mesh_of(2), 2)
    wanted = run(block, fields)
    block.zero_grad()
    block.forward = CompiledBlock(block, block.forward)
    wire._traced_all_to_all.register_effect(None)
    try:
        with pytest.warns(
            UserWarning, match="Level runs uncompiled .*: the compiler moved or left"
        ):
            found = run(block, fields)
    finally:
        keep_in_order(wire._traced_all_to_all)
    for result, value in zip(found, wanted, strict=True):
        torch.testing.assert_close(result, value)


@pytest.mark.spmd(2)
def test_a_compiled_block_in_another_is_part_of_its_graph():
    block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())
    plain = copy.deepcopy(block)
    forget()
    block[0].forward = CompiledBlock(block[0], block[0].forward, AS_COMPILER)
    compiled_block = CompiledBlock(block, block.forward, AS_COMPILER)
    fields = lightning_shard.shard(torch.randn(2, 4, 9, 8), mesh_of(2), 2)
    with warnings.catch_warnings(action="error"):
        found = twice(compiled_block, fields)
    torch.testing.assert_close(whole(found), whole(plain(fields)))
    (region,) = compiled._REGIONS.values()
    assert not region.refused


def twice(block, fields):
    block(fields)
    return block(fields)


@pytest.mark.spmd(2)
def test_what_draws_random_numbers_runs_uncompiled():
    block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout(0.5))
    forget()
    compiled_block = CompiledBlock(block, block.forward, AS_COMPILER)
    fields = lightning_shard.shard(torch.randn(2, 4, 9, 8), mesh_of(2), 2)
    with pytest.warns(UserWarning, match="Sequential runs uncompiled on split tensors: .*random"):
        twice(compiled_block, fields)
    torch.manual_seed(5)
    found = compiled_block(fields)
    torch.manual_seed(5)
    assert lightning_shard.gather(found).equal(lightning_shard.gather(block(fields)))


class Masked(nn.Module):
    def forward(self, x):
        return x - x[x > 0].mean()


class Scattered(nn.Module):
    def forward(self, x):
        rows = (x.detach()[0, 0, :, 0] * 10).long().abs() % x.shape[2]
        return x.index_add(2, rows, x)


class LookedUp(nn.Module):
    def forward(self, x):
        rows = (x.detach() * 10).long().abs() % x.shape[2]
        return x[:, :, rows[0, 0, :, 0]] + x.gather(2, rows)


@pytest.mark.slow_rows("LookedUp-str")
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Masked(), "how many rows a mask chooses"),
        (Scattered(), "which rows travel"),
        (LookedUp(), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rows_that_values_decide(block, reason):
    forget()
    compiled_block = copy.deepcopy(block)
    compiled_block.forward = CompiledBlock(compiled_block, compiled_block.forward, AS_COMPILER)
    fields = lightning_shard.shard(torch.randn(2, 4, 9, 8).double(), mesh_of(2), 2)
    expected = run(block, fields)
    warned = pytest.warns(UserWarning, match=f"runs uncompiled.*{reason}")
    with warned if reason else contextlib.nullcontext():
        found = run(compiled_block, fields)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_too_many_layouts_run_uncompiled():
    block = nn.Conv2d(1, 1, 3, padding=1)
    forget()
    compiled_block = CompiledBlock(block, block.forward, AS_COMPILER)
    told = []
    for rows in (7, 8, 9, 10):
        fields = lightning_shard.shard(torch.randn(1, 1, rows, 5), mesh_of(2), 2)
        with (
            mock.patch.object(compiled, "LAYOUTS_PER_BLOCK", 2),
            warnings.catch_warnings(record=True, action="always") as noted,
        ):
            found = twice(compiled_block, fields)
        told += [str(w.message) for w in noted]
        torch.testing.assert_close(whole(found), whole(block(fields)))
    reason = "it was compiled for 2 kinds of arguments"
    assert told == [f"Conv2d runs uncompiled on split tensors: {reason}"]
    assert len(compiled._REGIONS) == 2


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_a_second_derivative_is_refused():
    block = Residual()
    forget()
    compiled_block = CompiledBlock(block, block.forward, AS_COMPILER)
    fields = lightning_shard.shard(torch.randn(1, 4, 9, 8), mesh_of(2), 2).requires_grad_()
    loss = twice(compiled_block, fields).square().sum()
    with pytest.raises(UnsupportedOperationError, match="compiled block has no second derivative"):
        torch.autograd.grad(loss, fields, create_graph=True)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.factor, self.power = nn.BatchNorm2d(4), 2.0, {"of": [1.0]}

    def forward(self, x):
        return torch.conv2d(
            self.factor * self.norm(x) ** self.power["of"][0], torch.ones(1, 4, 3, 1)
        )


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_what_a_block_reads_is_guarded():
    """A change of an attribute, of the mode, of precision or of gradients is seen."""
    block = Scaled()
    forget()
    compiled_block = CompiledBlock(block, block.forward, AS_COMPILER)
    fields = lightning_shard.shard(torch.randn(2, 4, 9, 8), mesh_of(2), 2)
    changes = {
        "none": lambda: None,
        "evaluation": block.eval,
        "of a part": lambda: setattr(block.norm, "eps", 0.5),
        "of a number": lambda: setattr(block, "factor", 3.0),
        "in a container": lambda: block.power["of"].insert(0, 2.0),
        "training": block.train,
    }
    for name, change in changes.items():
        change()
        plain = copy.deepcopy(block)
        contexts = [torch.no_grad, bfloat16] if name == "training" else []
        for context in (contextlib.nullcontext, *contexts):
            with context():
                found, wanted = twice(compiled_block, fields), twice(plain, fields)
            assert found.dtype == wanted.dtype, name
            assert found.requires_grad == wanted.requires_grad
            torch.testing.assert_close(whole(found), whole(wanted))
            for a, b in zip(block.buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(a, b)


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


def whole(x):
    return lightning_shard.gather(x) if isinstance(x, lightning_shard.DomainTensor) else x


class Codebook(nn.Module):
    """Counts over all processes, as layers do that keep statistics of their own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        seen = x.detach().mean((0, 2, 3)).sum()
        dist.all_reduce(seen)
        self.get_buffer("count").add_(seen)
        return x * seen


@pytest.mark.spmd(2)
def test_own_collectives_of_a_block():
    block = Codebook()
    forget()
    plain, compiled_block = copy.deepcopy(block), CompiledBlock(block, block.forward, AS_COMPILER)
    fields = lightning_shard.shard(torch.randn(2, 4, 9, 8), mesh_of(2), 2)
    for _ in range(3):
        found, wanted = whole(compiled_block(fields)), whole(plain(fields))
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(block.count, plain.count)


@pytest.mark.spmd(2)
def test_a_block_that_holds_others_runs_uncompiled_around_them():
    block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())
    plain = copy.deepcopy(block)
    forget()
    shard_block(block[0], mesh_of(2), ShardingOptions("full"))
    compiled_block = CompiledBlock(block, block.forward, AS_COMPILER)
    fields = lightning_shard.shard(torch.randn(2, 4, 9, 8), mesh_of(2), 2)
    assert compiled_block.holds_others
    torch.testing.assert_close(whole(twice(compiled_block, fields)), whole(plain(fields)))
    assert not compiled._REGIONS
