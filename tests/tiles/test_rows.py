"""Rows of a field in tiles: all that is written into them reaches the field."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_shard import gather, shard
from tests.parity import tiles_of
from tests.tensor.test_rows import FIELD, WRITES


def split() -> Tensor:
    return shard(FIELD.clone(), tiles_of(3), 0)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_each_way_of_writing_is_seen(mode) -> None:
    for name, write in WRITES.items():
        with mode():
            x, whole = split(), FIELD.clone()
            write(x[4])
            write(whole[4])
            assert gather(x * 1).equal(whole), name


def test_a_write_that_no_call_makes_is_brought_back_by_the_next() -> None:
    """As by an extension in C++."""
    x, whole = split(), FIELD.clone()
    row = x[4]
    with torch._C.DisableTorchFunctionSubclass():
        row.mul_(2)
    assert (row + 1).equal(whole[4].mul_(2) + 1)
    assert gather(x * 1).equal(whole)


def test_an_array_of_the_rows_cannot_be_written() -> None:
    row = split()[4]
    for array in (row.numpy(), np.asarray(row)):
        assert array.tolist() == FIELD[4].tolist()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_nothing_reads_the_memory_of_a_field() -> None:
    with pytest.raises(RuntimeError, match=r"no memory of its own, .* lightning_shard\.gather"):
        torch.to_dlpack(split())
    assert torch.from_dlpack(gather(split())).equal(FIELD)  # the way out
