"""One exchange between the tiles of a group: what each brings, and what each gets."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from lightning_shard.processes.errors import StuckError
from lightning_shard.tiles.mover import Mover

Compute = Callable[[list[Any]], list[Any]]  # from the values of all members to the result of each

STUCK = (
    "the tiles cannot go on: an operation exchanges on some of them what it does not exchange on "
    "others, as a rule that decides by the rows of its tile; take one tile, or another operation."
)


class Exchange:
    """Keeps the values that the members of a group bring to one exchange.

    Args:
        members: The tiles of the group.
        kind: The name of the exchange.

    Attributes:
        missing: The number of members that have not come.
    """

    __slots__ = ("_kind", "_members", "_results", "_values", "missing")

    def __init__(self, members: tuple[int, ...], kind: str) -> None:
        self._members, self._kind = members, kind
        self._values: list[Any] = [None] * len(members)
        self._results: list[Any] = []
        self.missing = len(members)

    def bring(self, place: int, value: Any, kind: str) -> None:
        """Keep the value of a member.

        Raises:
            StuckError: Another member has come for an exchange of another kind.
        """
        if kind != self._kind:
            raise StuckError(
                f"tile {self._members[place]} calls {kind} where another one calls {self._kind}: a "
                "rule does different things on them."
            )
        self._values[place] = value
        self.missing -= 1

    def compute(self, compute: Compute, mover: Mover | None, *, records: bool) -> None:
        """Compute the results after all members have come.

        Args:
            compute: A function from the values of all members to the result of each.
            mover: Gives it tensors of waiting tiles in the host's memory.
            records: True if the results have a graph.
        """
        around = nullcontext(self._values) if mover is None else mover.on_host(self._values)
        with torch.set_grad_enabled(records), around as values:
            self._results = compute(values)
        self._values = []

    def result_of(self, place: int) -> Any:
        """Hand its result to a member, once.

        Raises:
            StuckError: Some members have not come.
        """
        if self.missing:
            raise StuckError(STUCK)
        result, self._results[place] = self._results[place], None
        return result
