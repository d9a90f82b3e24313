"""A plain tensor that takes split rows becomes a split tensor: the same Python object.

As in `out = torch.zeros(B, T, C, H, W); out[:, t] = x`: every rank keeps its part of `out`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_shard.domain.align import take_part
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.torch_internals import is_view, storage_users


@dataclass(frozen=True)
class Became:
    """What a rule returns to turn the caller's plain tensor into the split tensor of a part."""

    plain: Tensor
    part: Any


def become_split(plain: Tensor, target: Subdomain, write: Callable[[Subdomain], Any]) -> Became:
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
    return Became(plain, part)


def refuse_shared(plain: Tensor) -> None:
    """Raise unless nothing but `plain` itself sees its memory."""
    if is_view(plain) or storage_users(plain) > 2:  # the tensor, and the object that asks
        raise UnsupportedOperationError(
            "a plain tensor of which there are views cannot take split rows; make it like the "
            "split tensor (torch.zeros_like)"
        )
