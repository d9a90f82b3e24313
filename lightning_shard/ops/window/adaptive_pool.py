"""Adaptive averages: output row o covers input rows o * N // M up to ceil((o + 1) * N / M).

With at least as many output rows as ranks, each rank fetches the rows of its own output rows. With
fewer, each pools its own rows for every output row, the few results are combined, and the dim is
whole afterwards: a global pooling moves one number per channel, not the field.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import simple, sum_over
from lightning_shard.domain.cache import made_once
from lightning_shard.domain.fetch import Span, fetch, needs_of
from lightning_shard.domain.layout import Factor
from lightning_shard.domain.memory import format_of
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements

AVERAGE = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


def output_sizes(x: Subdomain, n: int, output_size: Any) -> list[int]:
    listed = [output_size] if isinstance(output_size, int) else output_size
    sizes: list[int | None] = list(listed)
    sizes = sizes * n if len(sizes) == 1 else sizes
    return [own if m is None else int(m) for m, own in zip(sizes, x.shape[-n:], strict=True)]


def window(output_row: int, extent: int, output: int) -> Span:
    return output_row * extent // output, -(-(output_row + 1) * extent // output)


def fetched_windows(x: Subdomain, dim: int, output: int) -> tuple[Subdomain, Span, Span]:
    """The rows under this rank's output rows, with the output's layout; both spans of rows."""
    extent, layout = x.shape[dim], x.layout.with_dim(dim, output)
    (factor,) = layout.dims[dim]
    grid = layout.grid

    def spans(low: int, high: int) -> list[Span]:
        return [(window(low, extent, output)[0], window(high - 1, extent, output)[1])]

    low, high = factor.bounds(grid)
    rows = (
        fetch(x, dim, needs_of(output, grid.parts(factor.axes), spans)) if factor.axes else x.local
    )
    return x.like(rows, layout), spans(low, high)[0], (low, high)


@implements(*AVERAGE)
def adaptive_avg_pool(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    output_size: Any,
) -> Subdomain | Tensor:
    return average_rows(input, output_sizes(input, AVERAGE.index(func) + 1, output_size))


def average_rows(x: Subdomain, sizes: Sequence[int]) -> Subdomain | Tensor:
    """The last dims averaged to `sizes`: each a product with a (output, input rows) matrix."""
    pairs, stored = list(enumerate(sizes, x.ndim - len(sizes))), format_of(x.local)
    split = set(x.layout.split_dims)
    # whole dims first: what travels along a split one is then smaller
    for dim, size in sorted(pairs, key=lambda pair: pair[0] in split):
        x = _average_dim(simple(x, dim), dim, size)
    local = x.local.contiguous(memory_format=stored)
    return x.like(local) if x.layout.split_dims else local


def _average_dim(x: Subdomain, dim: int, output: int) -> Subdomain:
    ((factor,), grid) = x.layout.dims[dim], x.layout.grid
    if output == factor.extent:
        return x
    if output < grid.parts(factor.axes):
        matrix = (factor.extent, output, (0, output), factor.bounds(grid))
        local = sum_over(x, _averaged(x.local, dim, *matrix), [dim])
        return x.like(local, x.layout.with_dims({dim: (Factor(output),)}))
    x, rows, outputs = fetched_windows(x, dim, output)
    return x.like(_averaged(x.local, dim, factor.extent, output, outputs, rows))


def _averaged(x: Tensor, dim: int, extent: int, output: int, outputs: Span, rows: Span) -> Tensor:
    """The output rows `outputs` of the average along `dim`, of the input rows `rows` in `x`."""
    matrix = _averages(extent, output, outputs, rows, x.dtype, x.device)
    with torch.autocast(x.device.type, enabled=False):  # which leaves poolings alone
        return torch.matmul(x.movedim(dim, -1), matrix.t()).movedim(-1, dim)


@made_once
def _averages(
    extent: int,
    output: int,
    rows: Span,
    columns: Span,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Rows and columns of the matrix that averages the input rows under each output row."""
    o = torch.arange(*rows, device=device)[:, None]
    start, end = o * extent // output, -(-(o + 1) * extent // output)
    i = torch.arange(*columns, device=device)
    return (((i >= start) & (i < end)).double() / (end - start)).to(dtype)
