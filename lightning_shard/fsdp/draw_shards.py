"""Draws random numbers for shards as one process draws them for the whole.

On a mesh of CPUs torch draws for each shard from the default numbers (torch.distributed.tensor,
`_random.py`), which are the same on all ranks: so the noise of one shard is that of each other one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.processes.torch_private.internals import (
    handle_dtensors,
    local_shape_and_offset,
)

_aten = torch.ops.aten
_INTO = (
    _aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float,
    _aten.exponential_.default, _aten.cauchy_.default, _aten.log_normal_.default,
    _aten.geometric_.default, _aten.random_.default, _aten.random_.to,
    getattr(_aten.random_, "from"),
)  # fmt: skip
_LIKE = (
    _aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default,
    _aten.randint_like.low_dtype,
)  # fmt: skip


def draw_shards() -> None:
    """Let these operators draw so, from now on: each rank draws all numbers, and keeps its part."""
    for operator in _INTO:
        handle_dtensors(operator, _into)
    for operator in _LIKE:
        handle_dtensors(operator, _like)


def _into(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard = args[0]
    shard.to_local().copy_(_drawn(operator, shard, args, kwargs))
    return shard


def _like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard = args[0]
    drawn = _drawn(operator, shard, args, kwargs).clone()
    return DTensor.from_local(
        drawn, shard.device_mesh, shard.placements, shape=shard.shape, stride=shard.stride()
    )


def _drawn(operator: Any, shard: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """This rank's part of what one process draws."""
    local = shard.to_local()
    whole = torch.empty_strided(shard.shape, shard.stride(), dtype=local.dtype, device=local.device)
    drawn = operator(whole, *args[1:], **kwargs)
    where = local_shape_and_offset(shard.shape, shard.device_mesh, shard.placements)
    return drawn[tuple(slice(o, o + n) for n, o in zip(*where, strict=True))]
