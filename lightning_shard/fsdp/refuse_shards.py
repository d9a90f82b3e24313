"""Refuses what torch does wrong with DTensors, without a word.

`float(p.grad.norm())`, `.item()` and `if p.sum() > 1:` read what lies on this rank in torch 2.11 to
2.15: of a sum that is still a part on each rank, its part (torch.distributed.tensor,
`_sharding_prop.py`, which leaves `_local_scalar_dense` out). `p.data = value` changes the wrapper
of a DTensor, and leaves what it holds.
"""

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.processes.torch_private.internals import (
    handle_dtensors,
    read_number,
    set_data_of_dtensors,
)


@functools.cache
def refuse_shards() -> None:
    """Refuse these, from now on, where a tensor is a shard of a parameter or made of shards."""
    handle_dtensors(read_number, _number)
    set_data_of_dtensors(_check_data)


def _number(operator: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
    (tensor,) = args
    if not all(p.is_replicate() for p in tensor.placements):
        raise RuntimeError(
            "a number was read of a sharded parameter or gradient, as by float(p.grad.norm()), of "
            "which each rank has a part: read it of p.full_tensor() or p.grad.full_tensor(), on "
            "all ranks, or keep parameters whole with sharding='none'."
        )
    return operator(tensor.to_local())


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
