"""Heartbeats, which each rank counts in the store: the ranks whose processes still run."""

import time
from collections.abc import Sequence
from typing import Any

from lightning_shard.processes.failures.linux_processes import ended_among, note_process

SILENT_S = 30.0  # without a heartbeat of a rank that is waited for, on another machine


class Heartbeats:
    """The heartbeats of all ranks. Only the thread that talks to the store calls the methods."""

    def __init__(self, store: Any, prefix: str, rank: int, ranks: int) -> None:
        """Begin; all ranks do."""
        self._store, self._prefix = store, prefix
        self.rank, self.ranks = rank, ranks
        self._seen: dict[int, tuple[int, float]] = {}  # by rank a count, and since when it is that
        note_process(store, rank)

    def beat(self) -> None:
        """Count one heartbeat of this rank."""
        self._store.add(f"{self._prefix}/beat_{self.rank}", 1)

    def counts(self) -> list[int]:
        """Return how many heartbeats each rank has counted."""
        return [self._count(rank) for rank in range(self.ranks)]

    def silent_since(self, before: list[int]) -> list[int]:
        """Return the other ranks that have not counted since `counts` returned `before`."""
        now = self.counts()
        return [r for r in range(self.ranks) if now[r] == before[r] and r != self.rank]

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks of `ranks` whose processes are seen to have ended, on this machine."""
        return ended_among(self._store, [rank for rank in ranks if rank != self.rank])

    def lost(self, waited_for: Sequence[int]) -> list[int]:
        """Return the ranks that have ended or fallen silent; call it about every second."""
        now = time.monotonic()
        for rank in waited_for:
            count = self._count(rank)
            if self._seen.get(rank, (0, 0.0))[0] != count:
                self._seen[rank] = (count, now)
        seen = [(rank, self._seen[rank][1]) for rank in waited_for if rank in self._seen]
        silent = [rank for rank, since in seen if now - since > SILENT_S]
        return silent or self.ended(waited_for)

    def forget(self) -> None:
        """Begin to wait anew."""
        self._seen.clear()

    def _count(self, rank: int) -> int:
        return self._store.add(f"{self._prefix}/beat_{rank}", 0)
