"""Dual tensors of forward mode: each rank's part is dual, with its part of the tangent."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_shard.domain.align import local_part
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements
from lightning_shard.processes.torch_private.internals import make_dual, unpack_dual


@implements(make_dual, checked=False)
def dual(
    func: Callable[..., Any], x: Subdomain, tangent: Subdomain | Tensor, level: int
) -> Subdomain:
    """Join a split tensor and its tangent; rows of a tangent that is split otherwise travel."""
    if tuple(tangent.shape) != tuple(x.shape):
        raise RuntimeError(
            f"a tangent has the shape of its tensor, {tuple(x.shape)}; got {tuple(tangent.shape)}"
        )
    return x.like(func(x.local, local_part(tangent, x.layout), level=level))


@implements(unpack_dual, checked=False)
def primal_and_tangent(func: Callable[..., Any], x: Subdomain, level: int) -> Any:
    """Take a split tensor and its tangent apart; nothing travels."""
    primal, tangent = func(x.local, level=level)
    return x.like(primal), None if tangent is None else x.like(tangent)
