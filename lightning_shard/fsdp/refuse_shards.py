"""Refuses what torch does wrong with DTensors, without a word.

`float(p.grad.norm())`, `.item()` and `if p.sum() > 1:` read what lies on this rank in torch 2.11 to
2.15: of a sum that is still a part on each rank, its part (torch.distributed.tensor,
`_sharding_prop.py`, which leaves `_local_scalar_dense` out). `p.data = value` changes the wrapper
of a DTensor, and leaves what it holds. `w[0]` of the dim that is sharded is a gathered copy, so
`w[0].mul_(0.5)` and `p.grad[0] = 0` are lost, and `w.index_add_(0, ...)` is taken for a write into
copies of the whole. A convolution of two kernels gives that of their shards.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.fsdp.draw_shards import draw_shards
from lightning_shard.fsdp.losses_of_shards import compute_losses_of_shards
from lightning_shard.processes.torch_private.internals import (
    before_redistribution,
    handle_dtensors,
    handle_some_dtensors,
    read_number,
    set_data_of_dtensors,
)

_aten = torch.ops.aten
_OF_ROWS = (  # views of a part of one dim, which is the second argument or the last
    _aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default,
    _aten.unbind.int,
)  # fmt: skip
_INTO_ROWS = (_aten.index_add_.default, _aten.index_copy_.default)
_DIM_IS_LAST = (_aten.split.Tensor, _aten.split_with_sizes.default)


# called with the ranks before they exchange what they hold of a shard
BEFORE_SHARD_EXCHANGE: ContextVar[Callable[[tuple[int, ...]], None]] = ContextVar(
    "BEFORE_SHARD_EXCHANGE", default=lambda ranks: None
)


@functools.cache
def refuse_shards() -> None:
    """Refuse these, from now on, where a tensor is a shard of a parameter or made of shards.

    Random numbers and losses, which torch computes wrongly too, are computed rightly.
    """
    draw_shards()
    compute_losses_of_shards()
    handle_dtensors(read_number, _number)
    for operator in (*_OF_ROWS, *_INTO_ROWS):
        handle_some_dtensors(operator, _rows)
    handle_some_dtensors(_aten.convolution.default, _convolution)
    set_data_of_dtensors(_check_data)
    before_redistribution(lambda ranks: BEFORE_SHARD_EXCHANGE.get()(ranks))


def _number(operator: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
    (tensor,) = args
    if not all(p.is_replicate() for p in tensor.placements):
        raise RuntimeError(
            "a number was read of a sharded parameter or gradient, as by float(p.grad.norm()), of "
            "which each rank has a part: read it of p.full_tensor() or p.grad.full_tensor(), on "
            "all ranks, or keep parameters whole with sharding='none'."
        )
    return operator(tensor.to_local())


def _rows(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse a part of the dim along which a leaf, or a gradient, is sharded."""
    tensor, place = args[0], 2 if operator in _DIM_IS_LAST else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else 0) % max(tensor.ndim, 1)
    is_result = tensor.grad_fn is not None and operator not in _INTO_ROWS
    if is_result or not any(p.is_shard(dim) for p in tensor.placements):
        return NotImplemented
    if operator is _aten.slice.Tensor:
        _, _, start, end, step = (*args, *(None,) * 5)[:5]
        if not start and (end is None or end >= tensor.shape[dim]) and step in (None, 1):
            return NotImplemented  # all of it
    raise RuntimeError(
        f"a part of dim {dim} of a sharded parameter or gradient of shape {tuple(tensor.shape)}, "
        "as w[0], is a copy, and what is written into it would be lost: keep parameters whole with "
        "sharding='none', write a parameter within `with lightning_shard.whole_parameters(module):`"
        " on all ranks, or read p.full_tensor()[0]."
    )


def _convolution(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    """Refuse shards, of which torch computes parts of other shapes than the result has."""
    if not isinstance(args[0], DTensor):  # torch refuses a plain input of shards
        return NotImplemented
    shards = [x for x in args if isinstance(x, DTensor)]
    if all(p.is_replicate() for x in shards for p in x.placements):
        return NotImplemented
    raise RuntimeError(
        "a convolution of sharded parameters, as of two kernels that are merged: call it on "
        "p.full_tensor(), on all ranks, or keep parameters whole with sharding='none'."
    )


def _check_data(shard: Any, value: Any) -> None:
    local = shard.to_local()
    if not (isinstance(shard, nn.Parameter) and isinstance(value, Tensor)):
        return
    if value is shard or (isinstance(value, DTensor) and value.to_local() is local):
        return
    if value.device.type == local.device.type:  # else the module moves
        raise RuntimeError(
            f"p.data = value of a sharded parameter of shape {tuple(shard.shape)} would be lost: "
            "write p.data.copy_(value) in a hook such as on_train_batch_end, or keep parameters "
            "whole with sharding='none'."
        )
