"""Compares the order in which ranks that wait for each other have called functions.

They call the same ones, each on its rows. Where one has called another function, messages of two
different operations are paired, or wait for each other for ever.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lightning_shard.processes.failures.notice import Notice, told_by_all

Latest = Callable[[], tuple[int, int, list[str]]]
"""How often all ranks have begun anew; the number of calls since; the last of them, in order."""

_WAYS_OUT = (
    "Let all of these ranks call the same functions with the same numbers, and only then let one "
    "of them print or draw the result."
)


class CallOrder:
    """Compares the calls of this rank with those of the first one, through the store.

    Attributes:
        ahead: A sentence, where this rank waits in a call, and the other one waits between two
            calls, having called less; "" elsewhere. The other may yet come, unless all ranks wait.
    """

    def __init__(self, rank: int, ranks: Sequence[int], latest: Latest) -> None:
        """Begin before the first call.

        Args:
            rank: This rank.
            ranks: The ranks that call the same functions.
            latest: Returns what this rank has called.
        """
        self._latest, self._notice = latest, Notice(_key(rank))
        # one for each: of many ranks all would read what all have called
        self._other = ranks[1] if rank == ranks[0] else ranks[0]
        self.ahead = ""

    def difference(self, store: Any, waits: str) -> str | None:
        """Tell the others what this rank, which waits, has called; word where one differs.

        Args:
            store: The store of the ranks.
            waits: Says what waits: "call" for a function that is called with split tensors,
                "barrier" for one that will say by itself which rank is missing, or "".
        """
        began, number, calls = self._latest()
        self.ahead = ""
        self._notice.tell(store, [began, number, calls, waits])
        if not (told := told_by_all(store, [_key(self._other)])):
            return None
        other_began, other_number, others, other_waits = told[0]
        if began != other_began:
            return None
        first = max(number - len(calls), other_number - len(others))
        last = min(number, other_number)
        for at in range(first, last):
            here, there = calls[at - number], others[at - other_number]
            if here != there:
                return (
                    f"it has called {here} on split tensors where rank {self._other}, with which "
                    f"it shares its samples, has called {there}, and one waits for the other. "
                    f"{_WAYS_OUT}"
                )
        if first <= last < number and waits == "call" and not other_waits:
            self.ahead = (
                f"it has called {calls[last - number]} on split tensors, and rank {self._other}, "
                f"with which it shares its samples, has not. {_WAYS_OUT}"
            )
        return None

    def forget(self, store: Any) -> None:
        """Take back what was told, once this rank goes on."""
        self._notice.take_back(store)
        self.ahead = ""


def _key(rank: int) -> str:
    return f"lone_waits/{rank}/calls"
