"""Computes losses of shards, such as the distance of two weights, as those of the whole.

Torch has no rules of DTensors for these losses. It finds the placement of their result by the
simpler operators that they are made of (torch.distributed.tensor, `_decompositions.py`), but then
gives each shard to the loss itself. So a mean divides by the numbers of a shard: its gradients are
those of the whole times the ranks, and shards of fewer rows count as much as others.
"""

from typing import Any

import torch

from lightning_shard.processes.torch_private.internals import handle_dtensors
from lightning_shard.processes.torch_private.names import internal

_LOSSES = (
    "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)  # fmt: skip


def compute_losses_of_shards() -> None:
    """Let losses, and their gradients, be computed by simpler operators from now on."""
    for loss in _LOSSES:
        for name in (loss, f"{loss}_backward"):
            if hasattr(torch.ops.aten, name):
                handle_dtensors(getattr(torch.ops.aten, name).default, _in_simpler_operators)


def _in_simpler_operators(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return internal("torch._decomp.decomposition_table")[operator](*args, **kwargs)
