"""Softmax and its relatives take the global maximum of a split dim, then sum exponentials once."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import sum_over, volume
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.half import wide
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import cast_for, of_one, uncast
from lightning_shard.ops.reduce.extreme import extreme
from lightning_shard.ops.reduce.sums import Dims, reduced_dims, result, squeezed
from lightning_shard.ops.registry import implements
from lightning_shard.processes.torch_private.typed import special

_LOGS = (torch.log_softmax, Tensor.log_softmax, F.log_softmax, special.log_softmax)


@implements(
    torch.softmax,
    Tensor.softmax,
    F.softmax,
    special.softmax,
    *_LOGS,
    limits="the dim must be named",
)
def softmax(
    func: Callable[..., Tensor],
    x: Subdomain,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Subdomain:
    """Softmax or its logarithm; maxima and sums of exponentials travel if `dim` is split."""
    x, d = _operand(x, dim, _stacklevel, dtype)
    # in forward mode torch's own function loses the graph of its tangent
    if not x.layout.axes(d) and not (in_forward_mode() and x.shape[d]):
        alone = torch.log_softmax if func in _LOGS else torch.softmax
        return x.in_rows(alone(x.local, d, dtype))
    return _softmax(x, d, log=func in _LOGS)


@uncast
def _softmax(x: Subdomain, d: int, *, log: bool) -> Subdomain:
    x = x.in_rows(x.local.contiguous())  # as torch's result lies
    shifted = wide(x.local - _maximum(x, (d,)))
    powers = shifted.exp()
    total = sum_over(x, powers.sum(d, keepdim=True), (d,))
    return x.like((shifted - total.log() if log else powers / total).to(x.dtype))


@implements(F.softmin)
def softmin(func: Callable[..., Tensor], x: Subdomain, *args: Any, **kwargs: Any) -> Subdomain:
    """Softmax of the negated tensor; the same travels."""
    return softmax(func, x.like(-x.local), *args, **kwargs)


@implements(torch.logsumexp, Tensor.logsumexp, special.logsumexp)
def logsumexp(
    func: Callable[..., Tensor], x: Subdomain, dim: Dims, keepdim: bool = False
) -> Subdomain | Tensor:
    """Subtract the largest number in place of an infinite maximum: the sum then decides."""
    dims = reduced_dims(x, dim)
    if not x.layout.axes(*dims) or not volume(x.layout, dims):
        return result(x, torch.logsumexp(x.local, dims, keepdim), dims, keepdim)
    if not (x.local.is_floating_point() or x.local.is_complex()):
        x = x.like(x.local.to(torch.get_default_dtype()))
    (x,) = cast_for(of_one(torch.logsumexp, -1), x)
    return _logsumexp(x, dims, keepdim)


@uncast
def _logsumexp(x: Subdomain, dims: tuple[int, ...], keepdim: bool) -> Subdomain | Tensor:
    top = _maximum(x, dims)
    limits = torch.finfo(top.dtype)  # beside an infinity other powers are 0, and so are gradients
    top = top.clamp(limits.min, limits.max)
    powers = wide(x.local - top).exp()
    total = (sum_over(x, powers.sum(dims, keepdim=True), dims).log() + top).to(x.dtype)
    return result(x, total if keepdim else squeezed(total, dims), dims, keepdim)


def _operand(
    x: Subdomain, dim: int | None, dtype: Any, named_dtype: torch.dtype | None
) -> tuple[Subdomain, int]:
    """The operand in its dtype; `torch.softmax` has the dtype where F.softmax has a number."""
    if dim is None:
        raise UnsupportedOperationError(
            "softmax without a dim, which torch has deprecated; name it"
        )
    dtype = named_dtype or (dtype if isinstance(dtype, torch.dtype) else None)
    (x,) = cast_for(of_one(torch.softmax, -1), x) if dtype is None else (x.like(x.local.to(dtype)),)
    return x, x.layout.dim(dim)


def _maximum(x: Subdomain, dims: tuple[int, ...]) -> Tensor:
    """The maximum over `dims`, which stay with extent 1; a constant for autograd."""
    top = extreme(torch.amax, x.like(x.local.detach()), dims, True)
    return top.local if isinstance(top, Subdomain) else top
