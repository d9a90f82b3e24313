"""Brings what was written into a copy of rows back to the tensor that the rows were taken from.

As in `x[1:] -= flux` of a split dim: the rows are a copy, since those of another extent lie on
other ranks. They are changed there, and then assigned to the rows that they were taken from, which
sends each to its owner. Values and gradients are those of a view.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Copied, Subdomain, written_in_inference
from lightning_shard.ops.view.assign import setitem
from lightning_shard.processes.torch_private.internals import base_of, version_of, views_replayed


def refuse_lost_write(target: Subdomain) -> None:
    """Raise where what is written into a copy could not be written back.

    Raises:
        UnsupportedOperationError: It is not known which rows of the source they are.
        RuntimeError: The source is a leaf, as torch says it of a view of one.
    """
    if target.copied is None:
        return
    if any(link.index is None for link in _links(target.copied)):
        raise UnsupportedOperationError(
            "it would write into a copy, not into the tensor that the rows came from; assign with "
            "x[index] = value"
        )
    base = base_of(target.copied.source)
    if base.is_leaf and base.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "a view of a leaf Variable that requires grad is being used in an in-place operation."
        )


def after_write(target: Subdomain) -> None:
    """Write back what was written into a copy of rows; all ranks call."""
    if target.copied is None:
        written_in_inference(target.local)
        return
    links = _links(target.copied)
    for link in links:
        rows = link.rows
        empty = not (link.parent.local.numel() and rows.local.numel())
        with views_replayed(True) if empty else nullcontext():  # see tensor/tensor.py
            given = rows.like(rows.local * link.factor) if link.factor > 1 else rows
            value: Subdomain | Tensor = given if given.layout.split_dims else given.local
            setitem(Tensor.__setitem__, link.parent, link.index, value)
    written_in_inference(target.copied.source)
    for link in links:
        link.version = version_of(link.source)


def _links(copied: Copied) -> list[Copied]:
    """The copy, the copy that it was taken from, and so on."""
    found = [copied]
    while found[-1].parent.copied:
        found.append(found[-1].parent.copied)
    return found
