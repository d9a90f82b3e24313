"""What goes over the wire lies in memory one element after the other."""

import pytest
import torch

import lightning_shard
from lightning_shard.domain.wire import packed
from tests.parity import assert_same, mesh_of


@pytest.mark.parametrize("count", [0, 1, 2])
def test_rows_of_a_larger_step_are_bytes(count):
    rows = torch.arange(6.0)[::2][:count]
    flat = packed([rows], rows)
    assert flat.view(torch.uint8).numel() == 4 * count
    assert flat.tolist() == rows.tolist()


@pytest.mark.spmd(3)
def test_one_row_each_of_a_larger_step():
    field = torch.arange(5.0, dtype=torch.float64)
    rows = lightning_shard.shard(field, mesh_of(3), 0)[::2]
    assert_same(lightning_shard.gather(torch.cat([rows, rows])), torch.cat([field[::2]] * 2))


@pytest.mark.spmd(3)
def test_a_gradient_of_zeros_without_memory_is_sent():
    """As autograd makes it of sgn; each rank sends it, whatever it has to send."""
    field = torch.randn(20, 3, dtype=torch.float64).requires_grad_()
    longer = lightning_shard.shard(torch.cat([field[:1], field]), mesh_of(3), 0)
    rows = longer.narrow(0, 1, 20)
    (gradient,) = torch.autograd.grad(lightning_shard.gather(rows.sgn()).sum(), field)
    assert_same(gradient, torch.zeros_like(field))
