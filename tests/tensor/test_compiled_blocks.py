"""Blocks that are compiled, and run as they are where they are given split tensors."""

import copy
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import lightning_shard
from lightning_shard.memory import recompute
from lightning_shard.memory.recompute import compile_forward
from tests.parity import mesh_of

READ = {"scale": 1.0}


class Scaled(nn.Module):
    """Reads what no attribute of a module tells: a part of an object, and a value of the file."""

    def __init__(self):
        super().__init__()
        self.conv, self.config = nn.Conv2d(2, 2, 3, padding=1), SimpleNamespace(scale=1.0)

    def forward(self, x):
        return self.conv(x) * self.config.scale * READ["scale"]


@contextmanager
def on_kernels_of_torch():
    """The backend traces and divides graphs as the compiler does, and runs torch's kernels."""
    torch._dynamo.reset()
    plain = torch.compile
    with mock.patch.object(torch, "compile", lambda f: plain(f, backend="aot_eager")):
        yield


@pytest.mark.spmd(2)
@on_kernels_of_torch()
def test_what_a_block_reads_may_change():
    """No graph was told of it: what was compiled before went on with the old values."""
    block = Scaled()
    compile_forward([block])
    recompute._say_uncompiled.cache_clear()
    x = torch.randn(1, 2, 9, 4)
    split = lightning_shard.shard(x, mesh_of(2), 2)
    with pytest.warns(UserWarning, match="those that are given split ones run uncompiled"):
        block(split)
    for _ in range(2):
        expected = block.conv(x) * block.config.scale * READ["scale"]
        with warnings.catch_warnings(action="error", category=UserWarning):
            found = lightning_shard.gather(block(split)), block(x)
        for each in found:
            torch.testing.assert_close(each, expected)
        block.config.scale *= 2
        READ["scale"] = 3.0


# On a rank: torch counts devices as a first backward pass begins. Where it compiles, it finds
# eight and starts threads, after which this session could fork no ranks that differentiate.
@pytest.mark.slow
@pytest.mark.spmd(1)
@on_kernels_of_torch()
def test_a_copy_compiles_anew():
    block, x = Scaled(), torch.randn(1, 2, 9, 4)
    compile_forward([block])
    first = block(x)
    again = copy.deepcopy(block)
    nn.init.zeros_(again.conv.weight)
    assert not again(x).equal(first)
    assert block(x).equal(first)
