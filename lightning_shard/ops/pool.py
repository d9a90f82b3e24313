"""Pooling: windows as in a convolution; adaptive averages as one small matrix per dim."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.comm import all_reduce
from lightning_shard.domain import Subdomain
from lightning_shard.halo import empty_attached, fetch, needs_of
from lightning_shard.layout import Factor
from lightning_shard.ops.align import simple
from lightning_shard.ops.conv import per_dim, window_rows
from lightning_shard.ops.registry import UnsupportedOperationError, implements

SPATIAL_DIMS: dict[Callable[..., Any], int] = {
    torch.max_pool1d: 1, torch.max_pool2d: 2, torch.max_pool3d: 3,
    F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3,
    F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3,
    F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3,
}  # fmt: skip


def pooled_extent(
    extent: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Output rows of a pooling; with `ceil_mode` the last window may hang over, but starts inside."""
    reach = extent + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return reach // stride + 1
    output = -(-reach // stride) + 1
    return output - 1 if (output - 1) * stride >= extent + padding else output


@implements(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d, F.max_pool1d, F.max_pool2d,
            F.max_pool3d)  # fmt: skip
def max_pool(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Subdomain:
    if return_indices:
        raise UnsupportedOperationError("max pooling with return_indices=True")
    x, n = input, SPATIAL_DIMS[func]
    kernels, dilations = per_dim(kernel_size, n), per_dim(dilation, n)
    strides = per_dim(stride or kernels, n)
    inner = per_dim(padding, n)
    layout = x.layout
    for i in range(n):
        dim = x.ndim - n + i
        k, s, p, d = kernels[i], strides[i], inner[i], dilations[i]
        output = pooled_extent(x.shape[dim], k, s, p, d, ceil_mode)
        if x.layout.axes(dim):
            x = window_rows(
                x, dim, output, kernel=k, stride=s, padding=p, dilation=d, fill=-math.inf
            )
            inner[i] = 0
            layout = layout.with_dims({dim: x.layout.dims[dim]})
        else:
            layout = layout.with_dim(dim, output)
    if 0 in layout.local_shape:
        return x.like(empty_attached(layout.local_shape, x.local), layout)
    local = func(x.local, kernels, strides, inner, dilations, ceil_mode)
    return x.like(local, layout)


@implements(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
def avg_pool(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Subdomain:
    """Sums over the windows, divided by how many rows each one counts."""
    x, n = input, SPATIAL_DIMS[func]
    kernels = per_dim(kernel_size, n)
    strides, paddings = per_dim(stride or kernels, n), per_dim(padding, n)
    counts = []
    for i in range(n):
        dim = x.ndim - n + i
        k, s, p, extent = kernels[i], strides[i], paddings[i], x.shape[dim]
        output = pooled_extent(extent, k, s, p, 1, ceil_mode)
        if x.layout.axes(dim):
            x = window_rows(x, dim, output, kernel=k, stride=s, padding=p)
        else:
            after = (output - 1) * s + k - p - extent
            padded = F.pad(x.local, [0, 0] * (x.ndim - dim - 1) + [p, max(after, 0)])
            x = x.like(padded, x.layout.with_dim(dim, output))
        low, high = x.layout.dims[dim][0].bounds(x.layout.grid)
        counts.append(_window_counts(low, high, k, s, p, extent, count_include_pad))
    if 0 in x.layout.local_shape:
        return x.like(empty_attached(x.layout.local_shape, x.local))
    sums = func(x.local, kernels, strides) * math.prod(kernels)
    if divisor_override:
        return x.like(sums / divisor_override)
    for i, count in enumerate(counts):
        sums = sums / torch.tensor(count, dtype=sums.dtype, device=sums.device).view(
            -1, *[1] * (n - 1 - i)
        )
    return x.like(sums)


def _window_counts(
    low: int, high: int, kernel: int, stride: int, padding: int, extent: int, with_pad: bool
) -> list[int]:
    """For each output row how many input rows its window counts."""
    first, last = (-padding, extent + padding) if with_pad else (0, extent)
    starts = [row * stride - padding for row in range(low, high)]
    return [min(start + kernel, last) - max(start, first) for start in starts]


@implements(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
def adaptive_avg_pool(
    func: Callable[..., Tensor], input: Subdomain, output_size: Any  # noqa: A002
) -> Subdomain | Tensor:
    """Each dim is a product with a (output rows, input rows) matrix of averages.

    With fewer output rows than ranks, partial averages are added up and the dim is whole afterwards;
    otherwise each rank fetches the rows of its own output rows.
    """
    x, n = input, SPATIAL_DIMS[func]
    sizes: list[int | None] = [output_size] * n if isinstance(output_size, int) else [*output_size]
    sizes = sizes * n if len(sizes) == 1 else sizes
    for i, size in enumerate(sizes):
        dim = x.ndim - n + i
        x = _average_dim(simple(x, dim), dim, x.shape[dim] if size is None else size)
    return x if x.layout.split_dims else x.local


def _average_dim(x: Subdomain, dim: int, output: int) -> Subdomain:
    ((factor,), grid) = x.layout.dims[dim], x.layout.grid
    parts = grid.parts(factor.axes)
    if output == factor.extent:
        return x
    if output < parts:
        matrix = _averages(factor.extent, output, (0, output), factor.bounds(grid))
        local = all_reduce(_along(x.local, dim, matrix), x.domain.group(factor.axes))
        return x.like(local, x.layout.with_dims({dim: (Factor(output),)}))
    layout = x.layout.with_dim(dim, output)
    low, high = layout.dims[dim][0].bounds(grid)

    def span(low: int, high: int) -> list[tuple[int, int]]:
        return [(low * factor.extent // output, -(-high * factor.extent // output))]

    needs = needs_of(output, parts, span)
    rows = fetch(x, dim, needs) if factor.axes else x.local
    matrix = _averages(factor.extent, output, (low, high), span(low, high)[0])
    return x.like(_along(rows, dim, matrix), layout)


def _along(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    matrix = matrix.to(x.device, x.dtype)
    return torch.matmul(x.movedim(dim, -1), matrix.t()).movedim(-1, dim)


@lru_cache(maxsize=256)
def _averages(
    extent: int, output: int, rows: tuple[int, int], columns: tuple[int, int]
) -> Tensor:
    """Rows and columns of the matrix whose row o averages inputs o*N//M up to ceil((o+1)*N/M)."""
    o = torch.arange(*rows)[:, None]
    start, end = o * extent // output, -(-(o + 1) * extent // output)
    i = torch.arange(*columns)
    inside = (i >= start) & (i < end)
    return inside.double() / (end - start)

