"""Lets programs write into shards in ways that torch does not know of DTensors.

`p.data = value` changes the wrapper of a DTensor and leaves what it holds. `torch._foreach_*`
refuses lists in which some parameters are whole, as in a step, and others are shards.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.processes.torch_private.internals import (
    foreach_functions,
    set_foreach_function,
    write_data_of_dtensors,
)

_FOREACH_COPY = foreach_functions()["_foreach_copy_"]
IN_STEP: ContextVar[bool] = ContextVar("IN_STEP", default=False)


@functools.cache
def write_shards() -> None:
    """Let these writes reach the shards, from now on."""
    write_data_of_dtensors(_write_data)
    for name, function in foreach_functions().items():
        set_foreach_function(name, _apart(_copying if name == "_foreach_copy_" else function))


@torch.no_grad()
def _write_data(shard: DTensor, value: Any) -> bool:
    """Copy `value`, whole or a shard, into the memory of a sharded parameter."""
    if not (isinstance(shard, nn.Parameter) and isinstance(value, Tensor)):
        return False
    local = shard.to_local()
    if value is shard or (isinstance(value, DTensor) and value.to_local() is local):
        return False
    if value.device.type != local.device.type:
        return False  # the module moves
    if value.shape != shard.shape or value.dtype != shard.dtype:
        raise RuntimeError(
            f"p.data = value of shape {tuple(value.shape)} and {value.dtype} for a sharded "
            f"parameter of shape {tuple(shard.shape)} and {shard.dtype}: both must agree once a "
            "module is sharded."
        )
    if IN_STEP.get() and shard.requires_grad:
        raise RuntimeError(
            f"p.data = value for a trained parameter of shape {tuple(shard.shape)} in a step, "
            "while it is a shard: backward would see the new value, which it does not in one "
            "process; write p.data.copy_(value), or do it in a hook such as on_train_batch_end."
        )
    if not isinstance(value, DTensor):
        value = distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)
    elif value.placements != shard.placements:
        value = value.redistribute(placements=shard.placements)
    local.copy_(value.to_local())
    return True


def _copying(targets: Any, sources: Any, *args: Any) -> Any:
    """Copy one by one: torch has no such function of lists of shards."""
    if not any(isinstance(t, DTensor) for t in (*targets, *sources)):
        return _FOREACH_COPY(targets, sources, *args)
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, *args)
    return targets


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of lists that runs for plain tensors and for shards one after the other."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        if not (isinstance(first, list | tuple) and _is_mixed(first)):
            return function(*args, **kwargs)
        results: list[Any] = [None] * len(first)
        for kind in (True, False):
            places = [i for i, t in enumerate(first) if isinstance(t, DTensor) is kind]

            def part(value: Any, places: list[int] = places) -> Any:
                is_list = isinstance(value, list | tuple) and len(value) == len(first)
                return [value[i] for i in places] if is_list else value

            found = function(*map(part, args), **{k: part(v) for k, v in kwargs.items()})
            for i, result in zip(places, found or (), strict=bool(found)):
                results[i] = result
        return None if all(r is None for r in results) else tuple(results)

    return wrapped


def _is_mixed(tensors: Any) -> bool:
    return len({type(t) is DTensor for t in tensors}) > 1
