"""Refuses what a copy of rows from other ranks would get wrong where torch gives a view.

`x[:, 2]` of columns that are split is a plain tensor that all ranks have. Nothing of ours sees a
write into it, but its memory counts writes. So such tensors are looked at once more when the next
function of a split tensor runs, and later while a variable still holds them.
"""

import sys

from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Copied, Subdomain
from lightning_shard.processes.simulated.state import per_rank
from lightning_shard.processes.torch_internals import storage_users, version_of

# each with how often it was written, and who had its memory, when it was given out
watched: list[tuple[Tensor, int, Copied, int]] = []
per_rank(sys.modules[__name__], "watched")
_OURS = 2  # references to a tensor of the list while one looks at it


def plain_rows(part: Subdomain) -> Tensor:
    """The rows of a part that no rank splits: a copy for each rank."""
    assert part.copied is not None
    rows = part.local
    # autograd keeps what it is a view of, and that tensor has the memory, too
    watched.append((rows, version_of(rows), part.copied, storage_users(rows)))
    return rows


def check_copies() -> None:
    """Look at the plain copies that were given out.

    Raises:
        UnsupportedOperationError: One of them was written in place, or what it is a copy of.
    """
    seen, kept = watched[:], []
    watched.clear()
    while seen:
        rows, version, copied, users = seen.pop()
        if version_of(rows) != version:
            raise UnsupportedOperationError(
                "rows that were taken from it before, as x[i] along the split dim, are a copy, and "
                "were written in place: the split tensor has not changed. Assign with x[index] = "
                "value, or take x[index].clone()"
            )
        if sys.getrefcount(rows) > _OURS or storage_users(rows) > users:
            if copied.is_stale:
                refuse_stale()
            kept.append((rows, version, copied, users))
    watched.extend(reversed(kept))


def refuse_stale() -> None:
    raise UnsupportedOperationError(
        "rows of other ranks are a copy, and the tensor that they come from was written in place "
        "since: torch would show the new values. Take the rows again after the write, or take "
        "x[index].clone() before it"
    )
