"""Clipping by the global norm when gradients are sharded."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def clip_grad_norm_(optimizer: Optimizer, clip_val: float | int) -> None:
    """Scale the gradients of `optimizer` so that their total 2-norm is at most `clip_val`.

    As `torch.nn.utils.clip_grad_norm_`, for sharded and plain gradients together.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    gradients = [g for g in gradients if g is not None]
    if not gradients or clip_val <= 0:
        return
    by_mesh: dict[
        Any, list[Tensor]
    ] = {}  # norms of different meshes cannot be added up as DTensors
    for g in gradients:
        by_mesh.setdefault(g.device_mesh if isinstance(g, DTensor) else None, []).append(g)
    total = torch.stack([_norm(part).square() for part in by_mesh.values()]).sum().sqrt()
    factor = (clip_val / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(local.device))


def _norm(gradients: Iterable[Tensor]) -> Tensor:
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
