"""Normalizes each sample: over its last dims, over a window of channels, or to unit length."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import in_own_memory, one_factor, sum_over, take_local, volume
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.half import wide
from lightning_shard.domain.local_group import after
from lightning_shard.domain.memory_format import format_of
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.window import window_rows
from lightning_shard.ops.autocast import cast_for, of_one
from lightning_shard.ops.norm.groups import groups_of
from lightning_shard.ops.norm.normalize import normalize_groups
from lightning_shard.ops.registry import implements, rule_for
from lightning_shard.processes.torch_private.typed import typed_torch


@implements(F.layer_norm, torch.layer_norm, limits="only the input may be split", joins=True)
def layer_norm(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Subdomain:
    """Normalize each sample over its last dims; its moments travel if one of them is split."""
    x, dims = input, _trailing(input, normalized_shape)
    if not dims or x.layout.parts(*dims) == 1:
        return x.like(func(x.local, list(normalized_shape), weight, bias, eps))
    (local,) = cast_for(of_one(F.layer_norm, (1,)), x.local)
    rows = math.prod(local.shape[: dims[0]])
    flat = local.reshape(1, rows, math.prod(local.shape[dims[0] :]))
    scale, shift = (_of_dims(x, dims, v) for v in (weight, bias))
    return after(
        normalize_groups(flat, None, None, groups_of(x, tuple(dims), rows, eps)),
        lambda made: x.like(_affine(made[0].view(local.shape), scale, shift)),
    )


@implements(F.rms_norm, torch.rms_norm, limits="only the input may be split", joins=True)
def rms_norm(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Subdomain:
    """Divide by the root mean square of the last dims; sums of squares travel if one is split."""
    x, dims = input, _trailing(input, normalized_shape)
    if not dims or x.layout.parts(*dims) == 1:
        return x.like(func(x.local, list(normalized_shape), weight, eps))
    (local,) = cast_for(of_one(F.rms_norm, (1,)), x.local)
    local = local.contiguous(memory_format=format_of(local))
    values = wide(local)
    eps = torch.finfo(values.dtype).eps if eps is None else eps
    total = sum_over(x, values.square().sum(dims, keepdim=True), dims)
    result = values * torch.rsqrt(total / volume(x.layout, dims) + eps)
    return x.like(_affine(result, _of_dims(x, dims, weight), None).to(local.dtype))


def _trailing(x: Subdomain, shape: Sequence[int]) -> list[int]:
    dims = list(range(x.ndim - len(shape), x.ndim))
    if dims and (dims[0] < 0 or x.shape[dims[0] :] != tuple(shape)):
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape "
            f"{['*', *shape]}, but got input of size {list(x.shape)}"
        )
    return dims


def _of_dims(x: Subdomain, dims: Sequence[int], value: Tensor | None) -> Tensor | None:
    """This rank's part of one value for each place along the last dims `dims`."""
    for d, dim in enumerate(x.layout.dims[dims[0] :]):
        if value is not None and any(f.axes for f in dim):
            value = take_local(value, d, dim, x.layout.grid)
    return value


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None and bias is not None:
        return torch.addcmul(bias, x, weight).to(x.dtype)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@implements(F.local_response_norm)
def local_response_norm(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    size: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
) -> Subdomain:
    """Normalize over neighbouring channels; some channels of other ranks travel."""
    x = input
    if 0 in x.local.shape and 0 not in x.shape and x.ndim > 2:  # torch would return it as it is
        (x,) = cast_for(of_one(func, 1), x)
        if not x.layout.axes(1):
            return x.like(empty_attached(x.local.shape, x.local, is_curved=True))
    if x.ndim < 3 or not x.layout.axes(1):
        return in_own_memory(x.like(func(x.local, size, alpha, beta, k)), x)
    x = one_factor(x, 1)
    rows = window_rows(x, 1, x.shape[1], kernel=size, stride=1, padding=size // 2).local
    own = x.local.shape[1]
    if own == 0:
        return x.like(empty_attached(x.local.shape, rows, is_curved=True))
    sums = sum(rows.narrow(1, i, own).square() for i in range(size))
    return x.like(x.local / (sums * (alpha / size) + k) ** beta)


@implements(F.normalize)
def normalize(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    p: float = 2.0,
    dim: Any = 1,
    eps: float = 1e-12,
) -> Subdomain:
    """Divide by the norm along `dim`; sums of powers travel if it is split."""
    norm = rule_for(typed_torch.norm)
    assert norm is not None
    size = norm.run(typed_torch.norm, input, p, dim, keepdim=True)
    size = size.local if isinstance(size, Subdomain) else size
    return input.like(input.local / size.clamp_min(eps))
