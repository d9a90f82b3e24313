"""Writes elements among all elements of a tensor in their order, where an index tensor says."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import common_layout, local_part, subdomains
from lightning_shard.domain.fetch_by_index import rows_of
from lightning_shard.domain.masked_rows import global_rows
from lightning_shard.ops.registry import implements, is_in_place
from lightning_shard.ops.view.aligned import Operand, as_table
from lightning_shard.ops.view.scatter import given_back, local_of
from lightning_shard.ops.view.write import Rows, Writing, written


@implements(torch.put, Tensor.put, Tensor.put_)
def put(
    func: Callable[..., Any], x: Operand, index: Operand, source: Operand, accumulate: bool = False
) -> Operand:
    """Write, or add up; an index may be counted from the end."""
    owner = subdomains([x, index, source])[0]
    count = math.prod(x.shape)
    places, values = (as_table(t, owner) for t in (index, source))
    layout = common_layout([places, values])
    numbers, wrong = rows_of([local_part(places, layout)], [count])
    order = None if accumulate else global_rows(layout.dims[0], layout.grid, numbers.device)
    rows = Rows(numbers, wrong, local_part(values, layout), layout.axes(), order)

    def run(target: Tensor, ids: Tensor, given: Tensor | None) -> Tensor:
        assert given is not None
        if accumulate:
            return target.index_add(0, ids, given)
        return target.index_copy(0, ids, given)

    def complaint(value: int, _: int) -> Exception:
        words = f"tried to access index {value} on a tensor of {count} elements."
        return IndexError(f"out of range: {words}")

    table = as_table(x, owner)
    if is_in_place(func):  # backward must not need what is written over
        table = table.like(table.local.clone())
    found = written(table, rows, Writing(run, complaint, accumulate))
    return given_back(func, x, found.reshape(local_of(x).shape))
