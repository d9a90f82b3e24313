"""Brings what was written into a copy of rows back to the tensor that the rows were taken from.

As in `x[1:] -= flux` of a split dim: the rows are a copy, since those of another extent lie on
other ranks. They are changed there, and then assigned to the rows that they were taken from, which
sends each to its owner. Values and gradients are those of a view.
"""

from contextlib import nullcontext
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor

from lightning_shard.domain.empty_ranks import written_alike
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Copied, Subdomain, written_in_inference
from lightning_shard.ops.view.assign import setitem
from lightning_shard.processes.torch_private.internals import (
    base_of,
    storage_key,
    version_of,
    views_replayed,
)

whole_rows: WeakSet[Copied] = WeakSet()  # copies that every rank holds whole, see tensor/rows.py


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
            "x[index] = value, or write into a clone()"
        )
    refuse_leaf(target)


def refuse_leaf(target: Subdomain) -> None:
    """Raise torch's error for a write into a leaf, or into a view of one.

    Raises:
        RuntimeError: The tensor, or the one that its rows are of, is a leaf that requires grad.
    """
    source = target.local if target.copied is None else target.copied.source
    base = base_of(source)
    if base.is_leaf and base.requires_grad and torch.is_grad_enabled():
        of = "a leaf" if base is target.local else "a view of a leaf"
        raise RuntimeError(
            f"{of} Variable that requires grad is being used in an in-place operation."
        )


def after_write(target: Subdomain) -> None:
    """Write back what was written into a copy of rows; all ranks call."""
    if target.copied is None:
        written_in_inference(target.local)
        return
    with nullcontext() if target.domain.has_graph else torch.no_grad():
        _write_back(target.copied)


def _write_back(copied: Copied) -> None:
    links = _links(copied)
    others = _untouched_by(copied)
    for link in links:
        rows = link.rows
        empty = not (link.parent.local.numel() and rows.local.numel())
        with views_replayed(True) if empty else nullcontext():  # see tensor/tensor.py
            given = rows.like(rows.local * link.factor) if link.factor > 1 else rows
            value: Subdomain | Tensor = given if given.layout.split_dims else given.local
            assign = partial(setitem, Tensor.__setitem__, link.parent, link.index, value)
            written_alike(link.parent, assign, link.index)
    written_in_inference(copied.source)
    for link in (*links, *others):
        link.version = version_of(link.source)


def refuse_stale() -> None:
    """Raise since a copy of rows is older than its source.

    Raises:
        UnsupportedOperationError: Always.
    """
    raise UnsupportedOperationError(
        "rows of other ranks are a copy, and the tensor that they come from was written in place "
        "since: torch would show the new values. Take the rows again after the write, or take "
        "x[index].clone() before it"
    )


def _untouched_by(written: Copied) -> list[Copied]:
    """Find copies of other rows of the same tensor, which a write into these does not make old."""
    return [
        copied for copied in list(whole_rows) if not copied.is_stale and _apart(copied, written)
    ]


def _apart(a: Copied, b: Copied) -> bool:
    """Return whether two copies certainly have no row of one tensor in common."""
    for link, other in zip(reversed(_links(a)), reversed(_links(b)), strict=False):
        if link is other:
            continue
        one, two = link.index, other.index
        if one is None or two is None or len(one) != len(two):
            return False
        if _place(link.parent.local) != _place(other.parent.local):
            return False
        places = range(link.parent.shape[len(one) - 1])
        rows, others = (
            [places[i]] if isinstance(i, int) else places[i] for i in (one[-1], two[-1])
        )
        return set(rows).isdisjoint(others)
    return False


def _place(x: Tensor) -> tuple[object, ...]:
    return storage_key(x), x.storage_offset(), x.shape, x.stride()


def _links(copied: Copied) -> list[Copied]:
    """The copy, the copy that it was taken from, and so on."""
    found = [copied]
    while found[-1].parent.copied:
        found.append(found[-1].parent.copied)
    return found
