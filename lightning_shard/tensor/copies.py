"""Refuses what a copy of rows from other ranks would get wrong where torch gives a view.

`x[:, 2]` of columns that are split is a plain tensor that all ranks have. Nothing of ours sees a
write into it, but its memory counts writes. So such tensors are looked at once more when the next
function of a split tensor runs, and later while a variable still holds them.
"""

import sys

from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Copied, Subdomain
from lightning_shard.processes.torch_internals import storage_users, version_of

watched: list[tuple[Tensor, int, Copied]] = []
_OURS = 2  # references to a tensor of the list, or to its memory, while one looks at it


def plain_rows(part: Subdomain) -> Tensor:
    """The rows of a part that no rank splits: a copy for each rank."""
    assert part.copied is not None
    watched.append((part.local, version_of(part.local), part.copied))
    return part.local


def check_copies() -> None:
    """Look at the plain copies that were given out.

    Raises:
        UnsupportedOperationError: One of them was written in place, or what it is a copy of.
    """
    seen, kept = watched[:], []
    watched.clear()
    while seen:
        rows, version, copied = seen.pop()
        if version_of(rows) != version:
            raise UnsupportedOperationError(
                "rows that were taken from it before, as x[i] along the split dim, are a copy, and "
                "were written in place: the split tensor has not changed. Assign with x[index] = "
                "value, or take x[index].clone()"
            )
        if sys.getrefcount(rows) > _OURS or storage_users(rows) > _OURS:
            if copied.is_stale:
                refuse_stale()
            kept.append((rows, version, copied))
    watched.extend(reversed(kept))


def refuse_stale() -> None:
    raise UnsupportedOperationError(
        "rows of other ranks are a copy, and the tensor that they come from was written in place "
        "since: torch would show the new values. Take the rows again after the write, or take "
        "x[index].clone() before it"
    )
