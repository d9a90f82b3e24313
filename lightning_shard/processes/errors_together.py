"""Runs a step on all ranks so that an error of one ends all; passes values to or from rank 0."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.processes.device import backends


def together(step: Callable[[], Any], group: dist.ProcessGroup | None = None) -> None:
    """Run `step` on all ranks of `group`; if it fails on some, all raise, and none waits for them.

    Raises:
        RuntimeError: It failed on another rank; on this rank its own error is raised.
    """
    error: Exception | None = None
    try:
        step()
    except Exception as err:
        error = err
    texts: list[str | None] = [None] * dist.get_world_size(group)
    text = all_stop(dist.get_rank(), error) if error else None
    if len(texts) > 1:
        dist.all_gather_object(texts, text, group=group)
    if error is not None:
        raise error
    if failed := [text for text in texts if text]:
        raise RuntimeError(failed[0])


def all_stop(rank: int, error: BaseException) -> str:
    """Word what ranks say that stop because another one failed."""
    return f"all ranks stop, because one failed: rank {rank}: {type(error).__name__}: {error}"


def gather_to_first(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather the values of all ranks on rank 0; the others get an empty list."""
    if dist.get_world_size(group) == 1:
        return [value]
    values = [None] * dist.get_world_size(group) if dist.get_rank() == 0 else None
    dist.gather_object(value, values, group=group)
    return values or []


@torch.no_grad()
def copy_from_first(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Give `tensor` the values that it has on rank 0; a DTensor, which has parts, keeps its own."""
    if isinstance(tensor, DTensor) or dist.get_world_size(group) == 1:
        return
    values = tensor.detach().contiguous()
    carried = [*backends(group)]
    if values.device.type not in carried:  # nccl and xccl know no tensors of the CPU
        values = values.to(carried[0])
    real = torch.view_as_real(values) if values.is_complex() else values
    dist.broadcast(real, group=group, group_src=0)
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)
