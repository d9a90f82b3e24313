"""Clips gradients, some of them sharded and some whole, as torch clips those of one process."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.domain.comm import all_reduce_extreme
from lightning_shard.processes.torch_private.typed import linalg


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients so that their total norm is at most `max_norm`; all ranks must call it.

    Args:
        parameters: Tensors whose gradients are clipped, as one vector: sharded and plain ones
            together, also on different meshes.
        max_norm: The largest norm that stays as it is.
        norm_type: The exponent of the norm, or infinity.
        error_if_nonfinite: True makes a norm that is not finite an error.

    Returns:
        The total norm before clipping, the same on all ranks.

    Raises:
        RuntimeError: The norm is not finite; on all ranks.
    """
    norm_type = float(norm_type)  # torch takes "inf", too
    gradients = _gradients(parameters)
    total = _total_norm(gradients, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            "clipped; look for the operation that overflows, or pass error_if_nonfinite=False to "
            "scale them by it."
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = _local(gradient)
        local.mul_(factor.to(local.device, local.dtype))
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
    """Clamp each element of the gradients to `[-clip_value, clip_value]`.

    Of a complex parameter the real and the imaginary part are clamped.
    """
    for gradient in _gradients(parameters):
        local = _local(gradient)
        real = torch.view_as_real(local) if local.is_complex() else local
        real.clamp_(-clip_value, clip_value)


def _gradients(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    return [p.grad for p in given if p.grad is not None]


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _total_norm(gradients: Iterable[Tensor], order: float) -> Tensor:
    """Norms of the parts, summed or compared over those mesh axes that split them."""
    by_axes: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        key = None
        if isinstance(gradient, DTensor):
            axes = tuple(i for i, p in enumerate(gradient.placements) if not p.is_replicate())
            key = gradient.device_mesh, axes
        by_axes.setdefault(key, []).append(_local(gradient))
    largest = math.isinf(order)
    totals: list[Tensor] = []
    for key, parts in by_axes.items():
        norms = [_norm(part, order).to(parts[0].device) for part in parts]
        norm = torch.stack([n.double() if n.dtype == torch.float64 else n.float() for n in norms])
        part = norm.amax() if largest else norm.pow(order).sum()
        if key is not None:
            mesh, axes = key
            part = part.to(mesh.device_type)  # shards may be offloaded, where no group is
            for axis in axes:
                group = mesh.get_group(axis)
                if largest:  # NaN is the largest, too
                    part = all_reduce_extreme(part, dist.ReduceOp.MAX, group)
                else:
                    dist.all_reduce(part, group=group)
        totals.append(part)
    if not totals:
        return torch.tensor(0.0, device="cpu")
    whole = torch.stack([t.to(totals[0].device, totals[0].dtype) for t in totals])
    return whole.amax() if largest else whole.sum().pow(1 / order)


def _norm(part: Tensor, order: float) -> Tensor:
    return linalg.vector_norm(part if part.numel() else part.new_zeros(1), order)
