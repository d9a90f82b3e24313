"""Convolutions: each rank fetches the rows under its own output rows, then convolves them."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain import Subdomain
from lightning_shard.halo import empty_attached, fetch, window_needs, window_span
from lightning_shard.layout import Layout
from lightning_shard.ops.align import simple
from lightning_shard.ops.registry import UnsupportedOperationError, implements


def per_dim(value: int | Sequence[int], count: int) -> list[int]:
    """One value for each spatial dim."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def window_rows(
    x: Subdomain,
    dim: int,
    output: int,
    *,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int = 1,
    fill: float = 0.0,
) -> Subdomain:
    """The rows of split `dim` under this rank's windows, padded with `fill` beyond the edges.

    Returns:
        The local rows, with the layout of the output in `dim`: a window function without padding
        gives exactly this rank's output rows. No rows where the rank has no output.
    """
    x = simple(x, dim)
    extent, grid = x.shape[dim], x.layout.grid
    layout = x.layout.with_dim(dim, output)
    (factor,) = layout.dims[dim]
    low, high = factor.bounds(grid)
    needs = window_needs(extent, grid.parts(factor.axes), output, kernel, stride, padding, dilation)
    rows = fetch(x, dim, needs)
    if high > low:
        first, last = window_span(low, high, kernel, stride, padding, dilation)
        before = max(min(-first, last - first), 0)
        after = last - first - before - rows.shape[dim]
        if before or after:
            rows = F.pad(rows, [0, 0] * (x.ndim - dim - 1) + [before, after], value=fill)
    return x.like(rows, layout)


@implements(
    F.conv1d,
    F.conv2d,
    F.conv3d,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    limits="channels and weights must be whole",
)
def conv(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Subdomain:
    x, n = input, weight.ndim - 2
    if not isinstance(x, Subdomain) or isinstance(weight, Subdomain):
        raise UnsupportedOperationError(
            "only the input of a convolution may be split, not its weight"
        )
    first = x.ndim - n  # the first spatial dim; 1 for an input without batch
    if x.layout.axes(first - 1):
        raise UnsupportedOperationError(f"convolution over split channels (dim {first - 1})")
    strides, dilations = per_dim(stride, n), per_dim(dilation, n)
    kernels = list(weight.shape[2:])
    paddings = _paddings(padding, kernels, dilations)
    inner = [before for before, _ in paddings]
    layout = x.layout.with_dim(first - 1, weight.shape[0])
    for i, (k, s, p, d) in enumerate(zip(kernels, strides, paddings, dilations, strict=True)):
        dim = first + i
        output = (x.shape[dim] + sum(p) - d * (k - 1) - 1) // s + 1
        if x.layout.axes(dim) and (k, s, *p) != (1, 1, 0, 0):
            x = window_rows(x, dim, output, kernel=k, stride=s, padding=p[0], dilation=d)
            inner[i] = 0
            layout = layout.with_dims({dim: x.layout.dims[dim]})
        elif not x.layout.axes(dim):
            layout = layout.with_dim(dim, output)
            if p[0] != p[1]:  # 'same' with an even kernel: torch pads the end by one more
                x = x.like(F.pad(x.local, [0, 0] * (x.ndim - dim - 1) + [0, p[1] - p[0]]))
    if 0 in layout.local_shape or x.local.numel() == 0:
        return x.like(_empty(layout, x.local, weight, bias), layout)
    return x.like(func(x.local, weight, bias, strides, inner, dilations, groups), layout)


def _paddings(
    padding: int | str | Sequence[int], kernels: Sequence[int], dilations: Sequence[int]
) -> list[tuple[int, int]]:
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernels, dilations, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    assert not isinstance(padding, str)
    return [(p, p) for p in per_dim(padding, len(kernels))]


def _empty(layout: Layout, *sources: Tensor | None) -> Tensor:
    if 0 in layout.local_shape:
        return empty_attached(layout.local_shape, *sources)
    raise UnsupportedOperationError(f"a convolution of nothing to shape {layout.shape}")
