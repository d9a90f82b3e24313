"""Batch, instance and group norms take the moments of the global tensor, then one multiply-add.

Each rank reduces its own rows to a mean and a variance. These few numbers per channel are gathered
once and combined exactly: each counts by its rank's number of rows, which all ranks know.
Half precision is reduced in float32.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import one_of_all, sum_over, take_local, volume, whole
from lightning_shard.domain.cache import made_once
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Grid, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements


def moments(
    x: Subdomain, dims: list[int], local: Tensor, local_dims: list[int]
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the global tensor along `dims`, which are kept with extent 1.

    Args:
        x: The split tensor.
        dims: The dims of `x` to reduce.
        local: The local tensor of `x`, or a view of it.
        local_dims: The dims of `local` that `dims` have become.
    """
    wide = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    if wide.numel():
        variance, mean = torch.var_mean(wide, local_dims, correction=0, keepdim=True)
    else:  # no rows here: of weight 0 below, and attached
        mean = variance = wide.sum(local_dims, keepdim=True)
    axes = x.layout.axes(*dims)
    if not axes:
        return mean, variance
    means, variances = one_of_all(x, axes, torch.stack([mean, variance])).unbind(1)
    weights = _weights(x.layout, tuple(dims), wide.dtype, wide.device)
    weights = weights.view(-1, *[1] * mean.ndim)
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + (means - mean).square())).sum(0)


@made_once
def _weights(
    layout: Layout, dims: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Each rank's share of the elements along `dims`, for the ranks that split them in order."""
    grid, axes = layout.grid, layout.axes(*dims)
    counts: list[int] = []
    for place in itertools.product(*(range(grid.sizes[a]) for a in axes)):
        at = dict(zip(axes, place, strict=True))
        coord = tuple(at.get(a, c) for a, c in enumerate(grid.coord))
        shape = replace(layout, grid=Grid(grid.sizes, coord)).local_shape
        counts.append(math.prod(shape[d] for d in dims))
    total = max(volume(layout, dims), 1)
    return torch.tensor([n / total for n in counts], dtype=dtype, device=device)


def normalized(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, of which autograd keeps only `x`."""
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale
    shift = shift if bias is None else shift + bias
    return torch.addcmul(shift, x, scale).to(x.dtype)


@implements(F.batch_norm, limits="only the input may be split")
def batch_norm(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Subdomain:
    """Normalize by statistics of all domain ranks; each rank keeps the same running buffers."""
    x = input
    if x.ndim < 2:
        raise UnsupportedOperationError("batch_norm of a tensor without channels (dim 1)")
    if not training:
        own = [_of_channels(x, v) for v in (running_mean, running_var, weight, bias)]
        return x.like(func(x.local, *own, False, momentum, eps))
    dims = [d for d in range(x.ndim) if d != 1]
    count = volume(x.layout, dims)
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}"
        )
    mean, variance = moments(x, dims, x.local, dims)
    unbiased = variance.detach() * (count / max(count - 1, 1))
    for buffer, value in ((running_mean, mean.detach()), (running_var, unbiased)):
        update_running(buffer, _all_channels(x, value.flatten()), momentum)
    shape = [1, -1, *[1] * (x.ndim - 2)]
    weight, bias = (None if v is None else _of_channels(x, v).view(shape) for v in (weight, bias))
    return x.like(normalized(x.local, mean, variance, weight, bias, eps))


@implements(F.instance_norm, limits="only the input may be split")
def instance_norm(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Subdomain:
    """Normalize each image by its statistics; the running ones take their mean over the batch."""
    x = input
    if not use_input_stats:
        return batch_norm(F.batch_norm, x, running_mean, running_var, weight, bias, False, eps=eps)
    dims = list(range(2, x.ndim))
    count = volume(x.layout, dims)
    if count == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {x.shape}"
        )
    mean, variance = moments(x, dims, x.local, dims)
    unbiased = variance.detach() * (count / max(count - 1, 1))
    for buffer, value in ((running_mean, mean.detach()), (running_var, unbiased)):
        if buffer is not None:
            total = sum_over(x, value.flatten(1).sum(0), [0])
            update_running(buffer, _all_channels(x, total / x.shape[0]), momentum)
    shape = [1, -1, *[1] * (x.ndim - 2)]
    weight, bias = (None if v is None else _of_channels(x, v).view(shape) for v in (weight, bias))
    return x.like(normalized(x.local, mean, variance, weight, bias, eps))


def _of_channels(x: Subdomain, values: Any) -> Any:
    """This rank's part of one value per channel."""
    if values is None or not x.layout.axes(1):
        return values
    return take_local(values, 0, x.layout.dims[1], x.layout.grid)


def _all_channels(x: Subdomain, local: Tensor) -> Tensor:
    """One value per channel, on every rank."""
    return whole(x.like(local, Layout((x.layout.dims[1],), x.layout.grid)), 0).local


@torch.no_grad()
def update_running(buffer: Tensor | None, value: Tensor, momentum: float) -> None:
    if buffer is not None:
        buffer.mul_(1 - momentum).add_(value.to(buffer.dtype), alpha=momentum)


@implements(F.group_norm, torch.group_norm, limits="channels (dim 1) must be whole")
def group_norm(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Subdomain:
    x, spatial = input, list(range(2, input.ndim))
    batch, channels = x.local.shape[0], x.shape[1]
    if x.layout.axes(1):
        raise UnsupportedOperationError("group_norm over split channels (dim 1)")
    if channels % num_groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got input of "
            f"shape {list(x.shape)} and num_groups={num_groups}"
        )
    per_group = channels // num_groups
    if x.shape[0] * per_group * volume(x.layout, spatial) == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}"
        )
    local = as_autocast(F.layer_norm, x.local)
    area = math.prod(local.shape[2:])
    view = local.reshape(batch, num_groups, per_group, area)
    mean, variance = moments(x, [1, *spatial], view, [2, 3])
    shape = (1, num_groups, per_group, 1)
    weight, bias = (None if v is None else v.view(shape) for v in (weight, bias))
    return x.like(normalized(view, mean, variance, weight, bias, eps).view(local.shape))


def as_autocast(func: Callable[..., Tensor], x: Tensor) -> Tensor:
    """`x` in the dtype in which autocast would run `func`."""
    if not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(func(x.detach().new_ones(1), [1]).dtype)
