"""A pager sees nothing while the tiles of a device take little of their budget."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from benchmarks.networks import UNet
from lightning_shard import Tiles, gather, shard
from lightning_shard.memory.paging.device_pager import pager_of
from tests.parity import assert_same

pytestmark = pytest.mark.spmd(1, "xpu")


def _gradients(budget: int | None, steps: int = 1, tiles: int = 4) -> tuple[Tensor, Any]:
    """All gradients of the last step on the device, and the pager of its tiles."""
    torch.manual_seed(0)
    device = torch.device("xpu", 0)
    network, field = UNet(8).to(device), torch.randn(1, 3, 64, 64).to(device)
    pager = pager_of(device, budget)
    for _ in range(steps):
        network.zero_grad()
        network(shard(field, Tiles((tiles,), pager), 2)).square().mean().backward()
    return parameters_to_vector([p.grad for p in network.parameters()]), pager


def test_sees_nothing_where_all_fits() -> None:
    kept, _ = _gradients(2**40)
    found, pager = _gradients(None)
    assert pager.operators == 0
    assert_same(found, kept)


def test_wakes_before_the_budget_is_taken() -> None:
    kept, _ = _gradients(None)
    budget, before = 2**22, torch.xpu.memory_allocated()
    torch.xpu.reset_peak_memory_stats()
    found, pager = _gradients(budget, steps=2)
    assert pager.operators > 0
    assert_same(found, kept)
    # beside the budget: the gradients, and what one operator of a tile needs
    assert torch.xpu.max_memory_allocated() - before < budget + 2**21


def test_keeps_what_it_has_not_seen() -> None:
    device = torch.device("xpu", 0)
    tiles = Tiles((4,), pager := pager_of(device, 2**20))
    first = shard(torch.arange(2.0**10, device=device).reshape(1, 1, 32, 32), tiles, 2)
    kept, many = first + 1, [first * n for n in range(2**9)]
    assert pager is not None
    assert pager.operators > 0
    for n in (0, 7, 511):
        assert_same(gather(many[n]), n * gather(first))
    assert_same(gather(kept), gather(first) + 1)
