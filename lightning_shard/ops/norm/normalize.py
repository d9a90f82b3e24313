"""Normalizes by the moments of the global tensor: one message forward, one backward.

Each rank reduces its own rows to a mean and a variance. These few numbers are gathered and combined
exactly: each counts by its rank's number of rows, which all ranks know. Then every value is
multiplied and added to. Both passes run on torch's fused kernels. A backward pass that is to be
differentiated again is a formula of functions that autograd knows; so is the forward pass in half
precision, of which float32 takes the moments.

A local tensor is (B, C, ...). Its C channels are K groups of neighbours; the values of a group
share their moments, along B too. Where each sample has moments of its own, the channels of all
samples are those of one: (1, B * C, rest).
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.align import one_of_all, sum_over, volume
from lightning_shard.domain.cache import made_once
from lightning_shard.domain.layout import Grid, Layout
from lightning_shard.domain.memory import format_of
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.wire import reduce_in_place
from lightning_shard.processes.torch_internals import in_transform

_HALF = (torch.float16, torch.bfloat16)
_sums = torch.ops.aten.native_batch_norm_backward


@dataclass(frozen=True)
class Groups:
    """Which values share their moments.

    Attributes:
        place: A part without rows, of the layout of the split tensor.
        dims: The dims of the split tensor along which values share moments.
        number: K, of this rank.
        count: How many values share them, over all ranks.
        eps: Is added to the variance.
    """

    place: Subdomain
    dims: tuple[int, ...]
    number: int
    count: int
    eps: float

    def flat(self, x: Tensor) -> Tensor:
        """(B, C, ...) -> (1, B * C, rest) of several samples with moments of their own."""
        if len(x) == 1 or 0 in self.dims:
            return x
        return x.reshape(1, x.shape[0] * x.shape[1], math.prod(x.shape[2:]))

    def view(self, x: Tensor) -> Tensor:
        """(B, C, ...), flat -> (B, K, C / K, rest)."""
        per_group = x.shape[1] // max(self.number, 1)
        return x.reshape(x.shape[0], self.number, per_group, math.prod(x.shape[2:]))

    def of_channels(self, values: Tensor) -> Tensor:
        """(..., C) -> (..., K, C / K)."""
        per_group = values.shape[-1] // max(self.number, 1)
        return values.reshape(*values.shape[:-1], self.number, per_group)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each group over all ranks, as (1, K, 1, 1)."""
        own = _own_moments(self.view(x.float() if x.dtype in _HALF else x))
        mean, variance = self.combined(own)
        return mean, variance

    def combined(self, own: Tensor) -> Tensor:
        """Mean and variance (2, ...) over all ranks from those of this rank's rows."""
        axes = self.place.layout.axes(*self.dims)
        if not axes:
            return own
        shares = _shares(self.place.layout, self.dims)
        weights = None if len({*shares}) == 1 else _weights(shares, own.dtype, own.device)
        return _mixed(one_of_all(self.place, axes, own), weights)

    def mean_of_all(self, sums: Tensor) -> Tensor:
        """Of sums for each group over this rank's values the mean over all values."""
        if not sums.numel():  # no sample here: as little on the ranks that share it
            return sums
        return sum_over(self.place, sums, self.dims) / self.count

    def add_up(self, sums: Tensor) -> None:
        """Replace such sums by those over all values."""
        axes = self.place.layout.axes(*self.dims)
        if axes and sums.numel():
            reduce_in_place(sums, dist.ReduceOp.SUM, self.place.domain.group(axes))


def _own_moments(view: Tensor) -> Tensor:
    """Mean and variance (2, 1, K, 1, 1) of each group of this rank's rows."""
    if view.numel():
        variance, mean = torch.var_mean(view, (0, 2, 3), correction=0, keepdim=True)
        return torch.stack([mean, variance])
    zeros = view.sum((0, 2, 3), keepdim=True)  # of weight 0 among the ranks, and attached
    return torch.stack([zeros, zeros])


def _mixed(parts: Tensor, weights: Tensor | None = None) -> Tensor:
    """The moments of all values (2, ...) from those of their parts (n, 2, ...).

    Args:
        parts: Mean and variance of each part.
        weights: The share of the values that each part has; alike if None.
    """
    if weights is None:
        spread, both = torch.var_mean(parts, 0, correction=0)
        both[1].add_(spread[0])
        return both
    weights = weights.view(-1, *[1] * (parts.ndim - 2))
    both = (weights.unsqueeze(1) * parts).sum(0)
    both[1].add_((weights * (parts[:, 0] - both[0]).square()).sum(0))
    return both


@made_once
def _weights(shares: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(shares, dtype=dtype, device=device)


@lru_cache(maxsize=4096)
def _shares(layout: Layout, dims: tuple[int, ...]) -> tuple[float, ...]:
    """Each rank's share of the elements along `dims`, for the ranks that split them in order."""
    grid, axes = layout.grid, layout.axes(*dims)
    counts: list[int] = []
    for place in itertools.product(*(range(grid.sizes[a]) for a in axes)):
        at = dict(zip(axes, place, strict=True))
        coord = tuple(at.get(a, c) for a, c in enumerate(grid.coord))
        shape = replace(layout, grid=Grid(grid.sizes, coord)).local_shape
        counts.append(math.prod(shape[d] for d in dims))
    total = max(volume(layout, dims), 1)
    return tuple([n / total for n in counts])


def groups_of(
    x: Subdomain, dims: tuple[int, ...], number: int, eps: float, parts: int = 1
) -> Groups:
    """The groups of values along `dims` of a split tensor.

    Args:
        x: The split tensor.
        dims: The dims along which values share moments.
        number: How many groups of channels this rank's tensor has.
        eps: Is added to the variance.
        parts: How many groups lie along `dims`.
    """
    place = x.like(x.local.new_empty(0))
    return Groups(place, dims, number, volume(x.layout, dims) // parts, eps)


def normalize_groups(
    local: Tensor, weight: Tensor | None, bias: Tensor | None, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """(local - mean) / sqrt(variance + eps) * weight + bias.

    Args:
        local: This rank's values, (B, C, ...).
        weight: A factor for each channel.
        bias: A summand for each channel.
        groups: Which values share their moments.

    Returns:
        The result, and of each group the mean and the biased variance over all ranks, (K), which
        carry no gradient.
    """
    given = [t for t in (local, weight, bias) if t is not None]
    fused = local.dtype in (torch.float32, torch.float64) and not in_transform()
    if fused and all(t.dtype == local.dtype for t in given):
        return _Normalize.apply(local, weight, bias, groups)
    flat = groups.flat(local)
    mean, variance = groups.moments(flat)
    weight, bias = (
        None if v is None else groups.of_channels(v).unsqueeze(-1) for v in (weight, bias)
    )
    result = normalized(groups.view(flat), mean, variance, weight, bias, groups.eps)
    return _shaped_as(local, result), mean.detach().flatten(), variance.detach().flatten()


def _shaped_as(x: Tensor, flat: Tensor) -> Tensor:
    """Values in the shape and the memory format of `x`."""
    if flat.shape == x.shape:
        return flat
    return flat.reshape(x.shape).contiguous(memory_format=format_of(x))


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


class _Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: Groups
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat = groups.flat(x)
        moments = groups.combined(_fused_moments(flat, groups))
        of_channels = _each_channel(flat, groups, moments)
        ctx.save_for_backward(x, weight, of_channels)
        ctx.groups = groups
        mean, variance = moments
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        result = _scaled(flat, weight, bias, of_channels, groups.eps)
        return _shaped_as(x, result), mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight, moments), groups = ctx.saved_tensors, ctx.groups
        grad, flat = groups.flat(grads[0]), groups.flat(x)
        if torch.is_grad_enabled():  # they are to be differentiated again
            of_x, *others = _gradients(grad, flat, weight, groups)
        else:
            of_x, *others = _fused_gradients(grad, flat, weight, moments, groups)
        wanted = zip((_shaped_as(x, of_x), *others), ctx.needs_input_grad, strict=False)
        return *(gradient if needed else None for gradient, needed in wanted), None


def _fused_moments(x: Tensor, groups: Groups) -> Tensor:
    """Of this rank's rows, (2, K); the kernel of group norm finds them for each of B."""
    samples, channels, area = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    stored = format_of(x)
    by_rows = stored == torch.contiguous_format
    # on other devices than the CPU that kernel does not look at the format
    if x.numel() == 0 or area == 1 or not (by_rows or x.is_cpu):
        return _own_moments(groups.view(x)).flatten(1)
    x = x.contiguous(memory_format=stored)
    if groups.number == channels and not by_rows:  # up to 15 times as fast there
        _, mean, deviation = torch.native_batch_norm(x, None, None, None, None, True, 0.0, 0.0)
        return torch.stack([mean, deviation.pow_(-2)])
    own = (samples, channels, area, groups.number, 0.0)
    _, means, deviations = torch.native_group_norm(x, None, None, *own)
    parts = torch.stack([means, deviations.pow(-2)], 1)
    return _mixed(parts) if samples > 1 else parts[0]


def _each_channel(x: Tensor, groups: Groups, values: Tensor) -> Tensor:
    """(2, K) -> (2, C), one after the other in memory.

    torch's kernels on the CPU do not look at the stride, which is 0 where one value is expanded.
    """
    per_group = x.shape[1] // max(groups.number, 1)
    if per_group == 1:
        return values
    return values.unsqueeze(2).expand(-1, -1, per_group).flatten(1).contiguous()


def _scaled(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, moments: Tensor, eps: float
) -> Tensor:
    """The formula of `normalized`, for each channel, by the kernel of batch norm."""
    if x.numel() == 0:
        return torch.empty_like(x)
    mean, variance = moments
    # not F.batch_norm, which refuses an eps of 0 before torch 2.12, nor cuDNN, which takes no small
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)


def _fused_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, moments: Tensor, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of `x`, `weight` and `bias`: two sums for each group go over the ranks at once."""
    inverse = torch.rsqrt(moments[1] + groups.eps)
    if x.numel():
        # of one sample that lies in no format the kernel of the CPU gives wrong sums
        grad, x = (t.contiguous(memory_format=format_of(x)) for t in (grad, x))
        own = (grad, x, weight, None, None, moments[0], inverse)
        _, of_weight, of_bias = _sums(*own, True, 0.0, [False, True, True])
    else:
        of_weight, of_bias = (x.new_zeros(x.shape[1]) for _ in range(2))
    sums = torch.stack([of_bias, of_weight])
    sums = sums if weight is None else sums.mul_(weight)
    sums = groups.of_channels(sums).sum(2, keepdim=True)
    groups.add_up(sums)
    shifts, slopes = (sums * groups.of_channels(inverse)).div_(-groups.count).flatten(1)
    result = _scaled(x, slopes, shifts, moments, groups.eps)
    factors = inverse if weight is None else inverse * weight
    result.addcmul_(grad, factors.view(1, -1, *[1] * (x.ndim - 2)))
    return result, of_weight, of_bias


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as functions of `grad`, `x` and `weight` that can be differentiated again."""
    mean, variance = groups.moments(x)
    inverse = torch.rsqrt(variance + groups.eps)
    distance = (groups.view(x) - mean) * inverse
    grad = groups.view(grad)
    scaled = grad if weight is None else grad * groups.of_channels(weight).unsqueeze(-1)
    sums = [part.sum((0, 2, 3), keepdim=True) for part in (scaled, scaled * distance)]
    along, across = groups.mean_of_all(torch.stack(sums))
    result = inverse * (scaled - along - distance * across)
    of_weight, of_bias = (part.sum((0, 3)).flatten() for part in (grad * distance, grad))
    return result.reshape(x.shape), of_weight, of_bias
