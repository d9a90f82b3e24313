"""Sees to copies of rows from other ranks where torch gives a view.

`x[:, 2]` of columns that are split is a plain tensor that all ranks have. Nothing of ours sees a
write into it, but its memory counts writes. So such tensors are looked at once more when the next
function of a split tensor runs, and later while a variable still holds them. What was written into
one is then written into the split tensor, too.
"""

import sys
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.view.write_back import after_write, refuse_lost_write
from lightning_shard.processes.torch_private.internals import base_of, storage_users, version_of


class Watched:
    """Plain rows that were given out, and what was known of them then.

    Attributes:
        part: The rows, with what they are a copy of.
        rows: The same.
        copied: Of what.
    """

    def __init__(self, part: Subdomain) -> None:
        assert part.copied is not None
        self.part, self.rows, self.copied = part, part.local, part.copied
        # autograd keeps what it is a view of, and that tensor has the memory, too
        self._users = storage_users(self.rows)
        self.remember()

    def remember(self) -> None:
        """They are as they should be."""
        self._version = version_of(self.rows)
        self._node = base_of(self.rows).grad_fn
        self._values = self.rows.clone() if self.rows.is_inference() else None

    @property
    def is_written(self) -> bool:
        """Whether someone has written; values say it where nobody counts, in inference mode."""
        old, new = self._values, self.rows
        if old is None:
            return version_of(new) != self._version
        return not bool(((old == new) | ((old != old) & (new != new))).all())

    @property
    def is_written_with_graph(self) -> bool:
        return base_of(self.rows).grad_fn is not self._node

    @property
    def is_held(self) -> bool:
        """Whether anyone else still has the rows."""
        copied = self.copied
        ours = _OURS + (copied.rows.local is self.rows)
        ours += copied.taken is not None and copied.taken[2] is self.rows
        return sys.getrefcount(self.rows) > ours or storage_users(self.rows) > self._users


watched: list[Watched] = []
PROCESS_STATE = {"watched": watched}
_OURS = 3  # references to rows while one looks at them: two of `Watched`, and the argument


def plain_rows(part: Subdomain) -> Tensor:
    """The rows of a part that no rank splits: a copy for each rank."""
    watched.append(Watched(part))
    return part.local


def check_copies() -> None:
    """Look at the plain copies that were given out; write back what was written into them.

    Raises:
        UnsupportedOperationError: One of them was written in place and its source, too; or someone
            still has one whose source was written.
    """
    seen, kept = watched[:], list[Watched]()
    watched.clear()
    while seen:
        entry = seen.pop()
        if entry.is_written:
            _written_back(entry)
        if entry.is_held:
            if entry.copied.is_stale:
                refuse_stale()
            kept.append(entry)
    watched.extend(reversed(kept))


def _written_back(entry: Watched) -> None:
    if entry.copied.is_stale:
        raise UnsupportedOperationError(
            "rows that were taken from it before, as x[i] along the split dim, are a copy; both "
            "were written in place since. Assign with x[index] = value, or take x[index].clone()"
        )
    # without a graph what was written without one
    with torch.set_grad_enabled(entry.is_written_with_graph):
        refuse_lost_write(entry.part)
        after_write(entry.part)
    entry.remember()


def remember_index(call: tuple[Any, ...], result: Any) -> None:
    """Remember which `x[index]` some copied rows are; `call` is `x, index`."""
    if isinstance(result, Subdomain) and result.copied is not None:
        x, index = call
        if isinstance(x, Subdomain) and all(isinstance(i, _BASIC) for i in _entries(index)):
            result.copied.taken = x.local, index, result.local


_BASIC = int | slice | NoneType | EllipsisType


def _entries(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def is_own_copy(call: tuple[Any, ...]) -> bool:
    """Whether `x[index] = value` assigns what `x[index]` gave, as `x[index] += 1` does at its end.

    What was added has been written back by then.
    """
    x, index, value = call
    if isinstance(value, Subdomain):
        copied, local = value.copied, value.local
    else:
        local = value
        copied = next((entry.copied for entry in watched if entry.rows is value), None)
    if copied is None or copied.taken is None or not isinstance(x, Subdomain):
        return False
    if not all(isinstance(i, _BASIC) for i in _entries(index)):
        return False
    source, taken, rows = copied.taken
    return source is x.local and rows is local and taken == index


def refuse_stale() -> None:
    raise UnsupportedOperationError(
        "rows of other ranks are a copy, and the tensor that they come from was written in place "
        "since: torch would show the new values. Take the rows again after the write, or take "
        "x[index].clone() before it"
    )
