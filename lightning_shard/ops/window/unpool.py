"""Max unpooling: each rank fetches the maxima whose windows reach its rows, and places its own."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import local_part, one_factor
from lightning_shard.domain.comm import all_reduce_extreme
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.window import per_dim, spread_rows
from lightning_shard.ops.autocast import cast_for
from lightning_shard.ops.registry import implements
from lightning_shard.ops.window.pool import unflat

UNPOOL = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)


@implements(*UNPOOL, limits="the indices must lie in the windows of their maxima")
def max_unpool(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    indices: Any,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    output_size: Sequence[int] | None = None,
) -> Subdomain:
    """Indices must lie in the windows of their maxima, as those of max pooling do.

    That is checked, which costs the reduction of one number.
    """
    n = UNPOOL.index(func) + 1
    (x,) = cast_for(_of_one(func), input)
    kernels = per_dim(kernel_size, n)
    strides, paddings = per_dim(stride or kernels, n), per_dim(padding, n)
    meta = [torch.empty(x.shape, dtype=d, device="meta") for d in (x.dtype, torch.long)]
    extents = func(*meta, kernels, strides, paddings, output_size).shape[-n:]
    for dim in range(x.ndim - n, x.ndim):
        x = one_factor(x, dim)
    places = x.like(local_part(indices, x.layout))
    _check(x, places.local, extents, (kernels, strides, paddings))
    layout = x.layout
    for i, extent in enumerate(extents):
        dim = x.ndim - n + i
        layout = layout.with_dim(dim, extent)
        if x.layout.axes(dim):
            window = {"kernel": kernels[i], "stride": strides[i], "padding": paddings[i]}
            x, _ = spread_rows(x, dim, extent, **window)
            places, _ = spread_rows(places, dim, extent, **window, fill=-1)
            layout = layout.with_dims({dim: x.layout.dims[dim]})
    if 0 in layout.local_shape:
        return x.like(empty_attached(layout.local_shape, x.local), layout)
    return x.like(_placed(x.local, places.local, extents, layout), layout)


@functools.cache
def _of_one(func: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: func(x, torch.zeros_like(x, dtype=torch.long), 1)


def _check(
    x: Subdomain, indices: Tensor, extents: Sequence[int], windows: Sequence[Sequence[int]]
) -> None:
    """Raise on all ranks if an index on any of them is outside of its window in a split dim."""
    n = len(extents)
    wrong = (indices < 0) | (indices >= math.prod(extents))
    rows = unflat(indices, extents)
    for i, (kernel, stride, padding) in enumerate(zip(*windows, strict=True)):
        dim = x.ndim - n + i
        if x.layout.axes(dim):
            low, high = x.layout.dims[dim][0].bounds(x.layout.grid)
            start = torch.arange(low, high, device=indices.device) * stride - padding
            offset = rows[i] - start.view(-1, *[1] * (n - 1 - i))
            wrong |= (offset < 0) | (offset >= kernel)
    flag = wrong.any().to(torch.int32)
    if all_reduce_extreme(flag, dist.ReduceOp.MAX, x.domain.group(x.layout.axes())).item():
        raise UnsupportedOperationError(
            "some indices lie outside of the windows of their maxima, so any rank may need them"
        )


def _placed(values: Tensor, indices: Tensor, extents: Sequence[int], layout: Layout) -> Tensor:
    """Zeros with `values` at those of the global `indices` that are rows of this rank."""
    n = len(extents)
    inside, places = indices >= 0, torch.zeros_like(indices)
    for row, dim in zip(unflat(indices, extents), range(layout.ndim - n, layout.ndim), strict=True):
        low, high = layout.dims[dim][0].bounds(layout.grid)
        inside &= (row >= low) & (row < high)
        places = places * (high - low) + row - low
    shape = layout.local_shape
    size = math.prod(shape[-n:])
    places = places.where(inside, size).flatten(-n)  # others' values go to one place behind
    target = values.new_zeros(*shape[:-n], size + 1)
    return target.scatter(-1, places, values.flatten(-n))[..., :size].reshape(shape).contiguous()
