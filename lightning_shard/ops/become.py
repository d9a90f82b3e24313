"""A plain tensor that takes split rows becomes a split tensor: the same Python object.

As in `out = torch.zeros(B, T, C, H, W); out[:, t] = x`: every rank keeps its part of `out`.

Where something else sees the memory of the plain tensor, as in `out[:, t].copy_(x)`, it stays
plain: the rows of all ranks are gathered, and every rank writes them.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import gathered, own_part, subdomains
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.strides import are_dense
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.torch_private.internals import is_view, storage_users

LARGE = 4096  # rows of a plain tensor beyond which it is split where split rows are added to it
_WORTH_A_WORD = 2**26  # bytes of a plain tensor that takes split rows and stays whole
_MADE = "_made_from_a_split_tensor"


@dataclass(frozen=True)
class BecameSplit:
    """The result of a rule that turns the caller's plain tensor into the split tensor of a part."""

    plain: Tensor
    part: Any


def become_split(
    plain: Tensor,
    target: Subdomain,
    write: Callable[[Subdomain], Any],
    *,
    is_alone: bool = False,
) -> BecameSplit | Tensor:
    """Split the caller's tensor in place, as `target.layout` says, and `write` into its part.

    Args:
        plain: The tensor.
        target: The tensor with the layout that it is to have.
        write: A function that writes into its part.
        is_alone: True if the ranks have agreed that nothing else sees it, as in `large_target`.

    Returns:
        The tensor with its part; the tensor alone where a view, or an array that shares its memory,
        would still see it whole. Then what was written is gathered, and lies whole on every rank.

    Raises:
        UnsupportedOperationError: It is a leaf that requires grad, or has no dim to be split.
    """
    if not target.layout.split_dims:
        raise UnsupportedOperationError("none of the dims of the plain tensor can be split")
    if plain.is_leaf and plain.requires_grad:
        raise UnsupportedOperationError("a plain leaf that requires grad cannot take split rows")
    strides = plain.stride() if are_dense(tuple(plain.shape), plain.stride()) else None
    local = own_part(plain, target.layout)
    part = Subdomain(local, target.layout, target.domain, None, strides)
    write(part)
    if not is_alone and shared_on_a_rank(plain, target):
        if plain.nbytes > _WORTH_A_WORD:
            warnings.warn(
                f"{plain.nbytes:,} bytes of split rows are written into a view of a plain tensor, "
                "which is whole on every rank; make it like the split tensor (torch.zeros_like) "
                "and it is split",
                stacklevel=3,
            )
        return plain.copy_(gathered(part))
    return BecameSplit(plain, part)


def made_from_split(plain: Tensor) -> Tensor:
    """Remember of a new plain tensor that a split one was asked for it: `x.new_zeros(nodes)`."""
    setattr(plain, _MADE, True)
    return plain


def large_target(x: Any, dim: int, sources: Sequence[Any]) -> Subdomain | None:
    """Choose the split of a plain tensor of many rows, to which split rows are written.

    The rows of a graph's nodes, to which messages are added, stay split; a histogram of few rows
    stays plain. So does what was not made from a split tensor: it may be a buffer of a module.

    Args:
        x: The tensor that is written to.
        dim: The dim of the rows.
        sources: The rows that are written, and their index, split along no other dim.

    Returns:
        The plain tensor, not cut yet, with the layout that it is to have; or None.
    """
    split = subdomains([*sources])
    if not isinstance(x, Tensor) or not getattr(x, _MADE, False) or x.shape[dim] <= LARGE:
        return None
    axes = {s.layout.axes(dim if s.ndim == x.ndim else 0) for s in split} - {()}
    if len(axes) != 1 or any(set(s.layout.axes()) - {*next(iter(axes))} for s in split):
        return None
    if x.requires_grad or shared_on_a_rank(x, split[0]):
        return None
    layout = Layout.of(x.shape, {dim: axes.pop()}, split[0].layout.grid)
    return split[0].like(x, layout)


def shared_on_a_rank(plain: Tensor, beside: Subdomain) -> bool:
    """Return whether something else may see the memory of `plain` on any rank; all ranks ask.

    One rank alone may keep a view, as rank 0 does to draw it. And a thread that looks where the
    others are keeps the last function that has looked at the tensor (failures/lone_waits.py).
    """
    if is_view(plain):  # by the program, which is that of every rank
        return True
    return beside.domain.any_says(lambda: is_shared(plain), beside.local.device)


def is_shared(plain: Tensor) -> bool:
    """Return whether a view, an array or another tensor may see the memory of `plain` here."""
    return is_view(plain) or storage_users(plain) > _own_users()


@functools.cache
def _own_users() -> int:
    """Count those that hold a memory nobody shares: the tensor, and what the call itself makes."""
    return storage_users(torch.empty(1, device="cpu"))
