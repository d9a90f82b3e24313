"""Normalizes by the moments of the global tensor: one message forward, one backward.

Each rank reduces its own rows to a mean and a variance. These few numbers are gathered and combined
exactly: each counts by its rank's number of rows, which all ranks know. Then every value is
multiplied and added to. Both passes run on torch's fused kernels. A backward pass that is to be
differentiated again is a formula of functions that autograd knows. Half precision is computed in
float32, and autograd keeps the values in half precision alone.

A local tensor is (B, C, ...), and its channels are K groups (ops/norm/groups.py).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.cache import made_once
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.memory_format import format_of, owned
from lightning_shard.ops.norm.groups import Groups, mixed, own_moments, wide
from lightning_shard.processes.torch_private.internals import in_transform

_sums = torch.ops.aten.native_batch_norm_backward


def normalize_groups(
    local: Tensor, weight: Tensor | None, bias: Tensor | None, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """(local - mean) / sqrt(variance + eps) * weight + bias.

    Args:
        local: This rank's values, (B, C, ...).
        weight: A factor for each channel.
        bias: A summand for each channel.
        groups: The values that share their moments.

    Returns:
        The result, and of each group the mean and the biased variance over all ranks, (K), which
        carry no gradient.
    """
    given = {wide(t).dtype for t in (local, weight, bias) if t is not None}
    fused = given in ({torch.float32}, {torch.float64})
    if fused and not in_transform() and not in_forward_mode():
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
        flat = groups.flat(wide(x))
        moments = groups.combined(_fused_moments(flat, groups))
        of_channels = _each_channel(flat, groups, moments)
        ctx.save_for_backward(x, weight, of_channels)
        ctx.groups, ctx.of_bias = groups, None if bias is None else bias.dtype
        mean, variance = map(owned, moments)
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        wide_weight, wide_bias = (None if v is None else wide(v) for v in (weight, bias))
        result = _scaled(flat, wide_weight, wide_bias, of_channels, groups.eps).to(x.dtype)
        return owned(_shaped_as(x, result), x), mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, own_weight, moments), groups = ctx.saved_tensors, ctx.groups
        grad, flat = groups.flat(wide(grads[0])), groups.flat(wide(x))
        weight = None if own_weight is None else wide(own_weight)
        if torch.is_grad_enabled():  # they are to be differentiated again
            of_x, *others = _gradients(grad, flat, weight, groups)
        else:
            of_x, *others = _fused_gradients(grad, flat, weight, moments, groups)
        dtypes = (x.dtype, None if own_weight is None else own_weight.dtype, ctx.of_bias)
        wanted = zip((_shaped_as(x, of_x), *others), dtypes, ctx.needs_input_grad, strict=False)
        return *(found.to(dtype) if needed else None for found, dtype, needed in wanted), None


def _fused_moments(x: Tensor, groups: Groups) -> Tensor:
    """Mean and variance of this rank's rows, shape (2, K).

    torch's kernel of group norm gives them for each of B samples; these are mixed.
    """
    samples, channels, area = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    if x.numel() == 0 or area == 1:
        return own_moments(groups.view(x)).flatten(1)
    own = (samples, channels, area, groups.number, 0.0)
    # contiguous: of channels_last the kernel of the CPU takes the difference of large numbers, a
    # variance of 1 around a mean of 100 is wrong by a tenth, and other devices' ignore the format
    _, means, deviations = torch.native_group_norm(x.contiguous(), None, None, *own)
    parts = torch.stack([means, deviations.pow(-2)], 1)
    return mixed(parts) if samples > 1 else parts[0]


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
    """Gradients of `x`, `weight` and `bias`; two sums for each group travel in one message.

    With g = dL/dy, n = (x - mean) / sigma and M values in a group, over all ranks: dL/dx = (w g -
    sum(w g) / M - n sum(w g n) / M) / sigma, where w is the weight of a value's channel. The two
    sums are over the whole group. dL/dw = sum(g n) and dL/db = sum(g) are over this rank's values
    of a channel; FSDP2 adds them up with the other parameters' gradients.
    """
    inverse = torch.rsqrt(moments[1] + groups.eps)
    if x.numel():
        # contiguous: of others the kernel of the CPU gives less exact sums, or wrong ones
        own = (grad.contiguous(), x.contiguous(), weight, None, None, moments[0], inverse)
        _, of_weight, of_bias = _sums(*own, True, 0.0, [False, True, True])
    else:
        of_weight, of_bias = (x.new_zeros(x.shape[1]) for _ in range(2))
    sums = torch.stack([of_bias, of_weight])
    sums = groups.of_channels(sums if weight is None else sums.mul_(weight))
    sums = sums if sums.shape[2] == 1 else sums.sum(2, keepdim=True)
    groups.add_up(sums)
    nothing = _nothing(x.dtype, x.device)
    scaled = torch.addcmul(nothing, sums, groups.of_channels(inverse), value=-1 / groups.count)
    shifts, slopes = scaled.flatten(1)
    result = _scaled(x, slopes, shifts, moments, groups.eps)
    factors = inverse if weight is None else inverse * weight
    result.addcmul_(grad, factors.view(1, -1, *[1] * (x.ndim - 2)))
    return result, of_weight, of_bias


@made_once
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


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
