"""Batch, instance and group norms: which values of the global tensor share their moments."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import sum_over, take_local, volume, whole
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import layout_of
from lightning_shard.domain.local_group import after
from lightning_shard.domain.memory_format import format_of
from lightning_shard.domain.subdomain import Domain, Subdomain
from lightning_shard.ops.autocast import cast_for, of_one
from lightning_shard.ops.norm.groups import groups_of
from lightning_shard.ops.norm.normalize import Normalized, normalize_groups
from lightning_shard.ops.registry import implements


@implements(F.batch_norm, limits="only the input may be split", joins=True)
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
        if not x.local.numel():
            return x.like(empty_attached(x.local.shape, x.local, *own[2:], is_curved=True))
        return x.like(_by_kernel(func, x.local, *own, False, momentum, eps))
    if x.layout.parts() == 1:
        statistics = running_mean, running_var, weight, bias
        return x.like(_by_kernel(func, x.local, *statistics, True, momentum, eps))
    dims = (0, *range(2, x.ndim))
    count = volume(x.layout, dims)
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}"
        )
    weight, bias = _of_channels(x, weight), _of_channels(x, bias)
    groups = groups_of(x, dims, x.local.shape[1], eps)

    def note(moments: Tensor) -> None:
        buffers, factors = (running_mean, running_var), (1.0, count / max(count - 1, 1))
        for buffer, value, times in zip(buffers, moments, factors, strict=True):
            update_running(x.domain, buffer, _all_channels(x, value), momentum, times)

    has_buffers = running_mean is not None or running_var is not None
    made = normalize_groups(x.local, weight, bias, groups, note if has_buffers else None)
    return after(made, lambda made: x.like(made[0]))


@implements(F.instance_norm, limits="only the input may be split", joins=True)
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
    x = input.in_rows(input.local.contiguous())  # as torch's, whose results lie row by row
    if not use_input_stats:
        return batch_norm(F.batch_norm, x, running_mean, running_var, weight, bias, False, eps=eps)
    if x.layout.parts() == 1:
        statistics = running_mean, running_var, weight, bias
        return x.like(_by_kernel(func, x.local, *statistics, True, momentum, eps))
    dims = tuple(range(2, x.ndim))
    count = volume(x.layout, dims)
    if count == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {x.shape}"
        )
    samples, channels = x.local.shape[:2]
    weight, bias = _of_channels(x, weight), _of_channels(x, bias)
    groups = groups_of(x, dims, samples * channels, eps)

    def noted(made: Normalized) -> Subdomain:
        result, (mean, variance) = made
        unbiased = variance * (count / max(count - 1, 1))
        for buffer, value in ((running_mean, mean), (running_var, unbiased)):
            if buffer is not None:
                total = sum_over(x, value.view(samples, channels).sum(0), [0])
                now = x.domain, buffer, _all_channels(x, total / x.shape[0]), momentum
                x.domain.at_end(partial(update_running, *now))
        return x.like(result)

    return after(normalize_groups(x.local, weight, bias, groups), noted)


def _by_kernel(func: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
    """Normalize values of which no other rank has a part.

    Torch's gradients on a CPU are wrong where the values and the gradient that comes lie in two
    orders: those of instance norm always, those of batch norm for one row or column, whose strides
    say nothing. So both lie row by row for it.
    """
    if func is F.batch_norm and 1 not in x.shape[2:]:
        return func(x, *others)
    found = func(x.flatten().view(x.shape), *others)
    return found.flatten().view(x.shape).contiguous(memory_format=format_of(x))


def _of_channels(x: Subdomain, values: Any) -> Any:
    """This rank's part of one value per channel."""
    if values is None or not x.layout.axes(1):
        return values
    return take_local(values, 0, x.layout.dims[1], x.layout.grid)


def _all_channels(x: Subdomain, local: Tensor) -> Tensor:
    """One value per channel, on every rank."""
    if not x.layout.axes(1):
        return local
    return whole(x.like(local, layout_of((x.layout.dims[1],), x.layout.grid)), 0).local


@torch.no_grad()
def update_running(
    domain: Domain, buffer: Tensor | None, value: Tensor, momentum: float, times: float = 1.0
) -> None:
    """Move a running statistic towards `times` the value in place, on every rank alike."""
    if buffer is not None and domain.writes_plain:
        buffer.mul_(1 - momentum).add_(value.to(buffer.dtype), alpha=momentum * times)


@implements(F.group_norm, torch.group_norm, limits="channels (dim 1) must be whole", joins=True)
def group_norm(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Subdomain:
    """Normalize groups of channels; mean and variance of the ranks' parts travel."""
    x, spatial = input, tuple(range(2, input.ndim))
    batch, channels = x.local.shape[0], x.shape[1]
    if x.layout.axes(1):
        raise UnsupportedOperationError("group_norm over split channels (dim 1)")
    if channels % num_groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got input of "
            f"shape {list(x.shape)} and num_groups={num_groups}"
        )
    if x.shape[0] * (channels // num_groups) * volume(x.layout, spatial) == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}"
        )
    if x.layout.parts(*spatial) == 1:
        return x.like(func(x.local, num_groups, weight, bias, eps))
    groups = groups_of(x, (1, *spatial), batch * num_groups, eps, parts=num_groups)
    (local,) = cast_for(of_one(torch.group_norm, 1), x.local)
    return after(normalize_groups(local, weight, bias, groups), lambda made: x.like(made[0]))
