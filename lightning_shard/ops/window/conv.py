"""Convolutions: each rank fetches the rows under its own output rows, then convolves them."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.window import per_dim, window_rows
from lightning_shard.ops.registry import implements


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
