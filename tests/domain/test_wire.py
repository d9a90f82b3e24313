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
