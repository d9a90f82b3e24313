"""Turns rows into channels and back: pixel shuffles, sliding blocks (unfold) and their sum (fold).

The blocks of `unfold` lie in one dim of L = Ho * Wo places, which stays the product of its factors:
a rank holds the blocks of its own rows, and `fold` finds the rows again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import one_factor
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import Span, fetch, needs_of
from lightning_shard.domain.layout import Dim, Factor, Layout, merge
from lightning_shard.domain.memory_format import rows_from
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.window import per_dim, spread_rows, window_rows
from lightning_shard.ops.registry import implements
from lightning_shard.ops.view.index import chosen_rows
from lightning_shard.ops.view.reshape import reshape_to


@implements(torch.pixel_shuffle, limits="channels must be whole")
def pixel_shuffle(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    upscale_factor: int,
) -> Subdomain:
    """Each rank fetches the rows of its output rows; of the outer two it may need a part."""
    x, r = input, upscale_factor
    layout = _with_channels(x, (1, r * r))
    starts: dict[int, int] = {}
    for dim in (x.ndim - 2, x.ndim - 1):
        layout = layout.with_dim(dim, x.shape[dim] * r)
        if x.layout.axes(dim):
            x, starts[dim] = _under(one_factor(x, dim), dim, r)
            layout = layout.with_dims({dim: x.layout.dims[dim]})
    if 0 in layout.local_shape:  # torch 2.15 has no backward of these functions for no elements
        return x.like(empty_attached(layout.local_shape, x.local), layout)
    local = func(x.local, r)
    return x.like(rows_from(local, starts, layout.local_shape), layout)


def _under(x: Subdomain, dim: int, scale: int) -> tuple[Subdomain, int]:
    """The rows that become this rank's of `scale` times as many, and where its own begin."""
    layout = x.layout.with_dim(dim, x.shape[dim] * scale)
    (factor,) = layout.dims[dim]

    def spans(low: int, high: int) -> list[Span]:
        return [(low // scale, -(-high // scale))]

    needs = needs_of(factor.extent, layout.grid.parts(factor.axes), spans)
    return x.like(fetch(x, dim, needs), layout), factor.bounds(layout.grid)[0] % scale


@implements(torch.pixel_unshuffle, limits="channels must be whole")
def pixel_unshuffle(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    downscale_factor: int,
) -> Subdomain:
    """Move blocks of pixels into channels; rows of blocks that two ranks share travel."""
    x, r = input, downscale_factor
    layout = _with_channels(x, (r * r, 1))
    for dim in (x.ndim - 2, x.ndim - 1):
        if x.shape[dim] % r:
            raise RuntimeError(
                f"pixel_unshuffle: dim {dim} of extent {x.shape[dim]} is not divisible by {r}"
            )
        layout = layout.with_dim(dim, x.shape[dim] // r)
        if x.layout.axes(dim):
            x = window_rows(x, dim, x.shape[dim] // r, kernel=r, stride=r, padding=0)
            layout = layout.with_dims({dim: x.layout.dims[dim]})
    if 0 in layout.local_shape:
        return x.like(empty_attached(layout.local_shape, x.local), layout)
    return x.like(func(x.local, r), layout)


def _with_channels(x: Subdomain, ratio: tuple[int, int]) -> Layout:
    """The layout with `ratio[0] / ratio[1]` times as many channels."""
    dim = x.ndim - 3
    if x.layout.axes(dim):
        raise UnsupportedOperationError(f"pixel shuffle of split channels (dim {dim})")
    channels, rest = divmod(x.shape[dim] * ratio[0], ratio[1])
    if rest:
        raise RuntimeError(
            f"pixel_shuffle: {x.shape[dim]} channels (dim {dim}) are not divisible by {ratio[1]}"
        )
    return x.layout.with_dim(dim, channels)


@implements(torch.channel_shuffle, torch.native_channel_shuffle)
def channel_shuffle(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    groups: int,
) -> Subdomain:
    """Output channel c * groups + g is channel c of group g."""
    x, channels = input, input.shape[1]
    if not x.layout.axes(1) or channels % groups:
        return x.like(func(x.local, groups))
    size = channels // groups
    return chosen_rows(x, 1, channels, lambda o: o % groups * size + o // groups)


@implements(F.unfold)
def unfold(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    stride: int | Sequence[int] = 1,
) -> Subdomain:
    """List sliding blocks as columns; rows under a rank's own blocks travel."""
    x, first = input, input.ndim - 2
    kernels, dilations = per_dim(kernel_size, 2), per_dim(dilation, 2)
    strides, inner = per_dim(stride, 2), per_dim(padding, 2)
    blocks: list[Factor] = []
    for i, (k, s, p, d) in enumerate(zip(kernels, strides, inner, dilations, strict=True)):
        dim = first + i
        output = _count(x.shape[dim], k, s, p, d)
        blocks.append(Factor(output, x.layout.axes(dim)))
        if x.layout.axes(dim):
            x = window_rows(x, dim, output, kernel=k, stride=s, padding=p, dilation=d)
            inner[i] = 0
    size = Factor(kernels[0] * kernels[1])
    dims = (*x.layout.dims[: first - 1], merge([*x.layout.dims[first - 1], size]), merge(blocks))
    layout = Layout(dims, x.layout.grid)
    if 0 in layout.local_shape:
        return x.like(empty_attached(layout.local_shape, x.local), layout)
    return x.like(func(x.local, kernels, dilations, inner, strides), layout)


def _count(extent: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The number of blocks along a dim."""
    blocks = (extent + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if blocks < 1:
        raise RuntimeError(
            f"{extent} rows with padding {padding} hold no block of {kernel}, dilation {dilation}"
        )
    return blocks


@implements(F.fold, limits="the values of a block must be whole")
def fold(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    output_size: Any,
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    stride: int | Sequence[int] = 1,
) -> Subdomain:
    """Each rank fetches the blocks that reach its rows, and adds them up."""
    kernels, dilations = per_dim(kernel_size, 2), per_dim(dilation, 2)
    strides, inner, rows = per_dim(stride, 2), per_dim(padding, 2), per_dim(output_size, 2)
    windows = list(zip(kernels, strides, inner, dilations, strict=True))
    blocks = [_count(n, *window) for n, window in zip(rows, windows, strict=True)]
    x, channels = _rows_of_blocks(input, kernels[0] * kernels[1], blocks)
    layout = x.layout.with_dims({x.ndim - 3: channels})
    starts: dict[int, int] = {}
    for i, (k, s, p, d) in enumerate(windows):
        dim = x.ndim - 2 + i
        layout = layout.with_dim(dim, rows[i])
        if x.layout.axes(dim):
            x, starts[dim] = spread_rows(x, dim, rows[i], kernel=k, stride=s, padding=p, dilation=d)
            layout = layout.with_dims({dim: x.layout.dims[dim]})
            rows[i], inner[i] = (x.local.shape[dim] - 1) * s + d * (k - 1) + 1, 0
    if 0 in layout.local_shape:
        return x.like(empty_attached(layout.local_shape, x.local), layout)
    local = func(x.local.flatten(-2), rows, kernels, dilations, inner, strides)
    return x.like(rows_from(local, starts, layout.local_shape), layout)


def _rows_of_blocks(x: Subdomain, area: int, blocks: Sequence[int]) -> tuple[Subdomain, Dim]:
    """(..., C * area, L) as (..., C * area, Ho, Wo); and the dim of the C channels."""
    *lead, values, count = x.shape
    if count != blocks[0] * blocks[1] or values % area:
        raise RuntimeError(
            f"fold needs {blocks[0]} * {blocks[1]} blocks of a multiple of {area} values; got "
            f"{count} blocks of {values}"
        )
    channels: Dim = (Factor(values // area),)
    if x.layout.axes(len(lead)):
        x = reshape_to(x, [*lead, values // area, area, count])
        if x.layout.axes(len(lead) + 1):
            raise UnsupportedOperationError("fold of blocks whose values are split")
        channels = x.layout.dims[len(lead)]
        x = reshape_to(x, [*lead, values, count])
    return _split_places(x, blocks), channels


def _split_places(x: Subdomain, blocks: Sequence[int]) -> Subdomain:
    """The last dim, of L places, as (Ho, Wo), each of one factor."""
    *dims, places = x.layout.dims
    for first in range(len(places) + 1):
        rows, columns = merge(places[:first]), merge(places[first:])
        if len(rows) == len(columns) == 1 and [rows[0].extent, columns[0].extent] == [*blocks]:
            layout = Layout((*dims, rows, columns), x.layout.grid)
            return x.like(x.local.reshape(layout.local_shape), layout)
    return reshape_to(x, [*x.shape[:-1], *blocks])
