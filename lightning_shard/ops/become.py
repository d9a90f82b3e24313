"""A plain tensor that takes split rows becomes a split tensor: the same Python object.

As in `out = torch.zeros(B, T, C, H, W); out[:, t] = x`: every rank keeps its part of `out`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain import Subdomain
from lightning_shard.ops.align import take_part
from lightning_shard.ops.registry import UnsupportedOperationError, wrapped


def become_split(plain: Tensor, target: Subdomain, write: Callable[[Subdomain], Any]) -> Tensor:
    """Split the caller's tensor in place, as `target.layout` says, and `write` into its part.

    Raises:
        UnsupportedOperationError: Something else would still see the tensor whole: a view, an array
            that shares its memory, or autograd.
    """
    if not target.layout.split_dims:
        raise UnsupportedOperationError("none of the dims of the plain tensor can be split")
    if plain.is_leaf and plain.requires_grad:
        raise UnsupportedOperationError("a plain leaf that requires grad cannot take split rows")
    refuse_shared(plain)
    part = target.like(take_part(plain, target.layout).clone())
    write(part)
    try:
        torch.utils.swap_tensors(plain, wrapped(part))
    except RuntimeError as error:
        raise UnsupportedOperationError(
            "a plain tensor that autograd has saved cannot take split rows; make it like the split "
            "tensor (torch.zeros_like)"
        ) from error
    return plain


def refuse_shared(plain: Tensor) -> None:
    """Raise unless nothing but `plain` itself sees its memory."""
    users = torch._C._storage_Use_Count(plain.untyped_storage()._cdata)
    if plain._is_view() or users > 2:  # the tensor, and the storage object of this line
        raise UnsupportedOperationError(
            "a plain tensor of which there are views cannot take split rows; make it like the "
            "split tensor (torch.zeros_like)"
        )
