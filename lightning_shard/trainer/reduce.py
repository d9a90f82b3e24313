"""Reduces as strategies promise, also where the collectives of a device know fewer reductions."""

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.comm import all_reduce
from lightning_shard.domain.half import wide

_OPERATIONS = ("mean", "avg", "sum", "max", "min", "product", "band", "bor", "bxor")


def reduce(
    tensor: Any, device: torch.device, group: dist.ProcessGroup | None, reduce_op: Any
) -> Any:
    """Reduce a tensor over `group`, on `device`; what is no tensor comes back as it is.

    Lightning's own function has a barrier before each reduction, which no collective needs, and
    asks the device for means: xccl has none of integers, so a mean is a sum that is divided.

    Raises:
        ValueError: There is no such reduction, or the tensors of the ranks differ in shape.
    """
    if not isinstance(tensor, Tensor) or not dist.is_initialized():
        return tensor
    if tensor.ndim:  # a number has no other shape elsewhere
        _refuse_other_shapes("reduce", tensor.to(device), group or dist.group.WORLD)
    op = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    if isinstance(op, str) and op not in _OPERATIONS:
        raise ValueError(f"{reduce_op!r} is no reduction; name one of {', '.join(_OPERATIONS)}.")
    mean = op in ("mean", "avg", dist.ReduceOp.AVG)
    op = "sum" if mean or op is None else op
    reduced = wide(tensor.to(device, copy=True))
    dist.all_reduce(
        reduced, getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op, group
    )
    reduced = divide(reduced, dist.get_world_size(group)) if mean else reduced
    return reduced.to(tensor.device, tensor.dtype)


def gather_each(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the tensors of all ranks of `group`, alike in shape: (ranks, *shape).

    Each rank gets the sum of the gradients that the ranks have of its tensor.

    Raises:
        ValueError: The shapes or the dtypes differ, on all ranks.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None
    _refuse_other_shapes("all_gather", tensor, group)
    return _GatherEach.apply(tensor, group)


def _refuse_other_shapes(name: str, tensor: Tensor, group: Any) -> None:
    """Compare shapes, since a collective of others ends the process, or reads foreign memory."""
    own = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    mark = torch.tensor([zlib.crc32(own), -zlib.crc32(own)], device=tensor.device)
    dist.all_reduce(mark, dist.ReduceOp.MAX, group=group)
    if int(mark[0]) != -int(mark[1]):
        shapes: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(shapes, own.decode(), group=group)
        raise ValueError(
            f"{name} was given tensors that differ: {'; '.join(shapes)}. Data replicas that do "
            "not divide the number of samples have other numbers of results: gather a sum and a "
            "count, pad to one shape, keep a torchmetrics.CatMetric, or let replicas repeat "
            "samples: Trainer(callbacks=[lightning_shard.RepeatSamples()])."
        )


class _GatherEach(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
        dist.all_gather(list(whole), tensor, group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce(grads[0], ctx.group)[dist.get_rank(ctx.group)], None


def divide(tensor: Tensor, number: int) -> Tensor:
    """Divide by the number of ranks; integers stay integers, and a truth of some ranks true."""
    if tensor.dtype == torch.bool:
        return tensor
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.div(number, rounding_mode="trunc" if whole else None)
