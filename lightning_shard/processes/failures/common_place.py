"""Lets all ranks stop at one place, among places to which all come in the same order.

As long as no rank asks for it, a place costs no message. Once one has asked, each rank answers to
which place it comes next, by the thread that talks to the store. All stop at the last of these:
nobody has passed it, and nobody passes it before all have answered.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_shard.processes.failures.store_thread import StoreThread

LOOK_EVERY_S = 1.0  # for ranks that have ended, while the answer of one is missing


class CommonPlace:
    """Counts the places to which this rank has come, and finds the one at which all stop.

    Attributes:
        why: The word with which this rank has asked; once all stop, that of the first one.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        ranks: int,
        *,
        talk: StoreThread,
        check: Callable[[], None],
    ) -> None:
        """Begin to count; all ranks do.

        Args:
            store: The store in which the ranks meet.
            name: The beginning of the names in it, new for each count.
            rank: The rank of this process.
            ranks: Number of ranks.
            talk: The thread that talks to the store, and calls `listen` now and then.
            check: Raises if a rank has ended, whose answer would never come.
        """
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks
        self._talk, self._check, self._lock = talk, check, threading.Lock()
        self._next = 0  # the number of the place to which this rank comes next
        self.why, self._has_answered = "", False
        self._all_stop_at: int | None = None

    def ask(self, why: str) -> None:
        """Ask all ranks to stop, with a word; a signal's handler may call it."""
        self.why = self.why or why

    def listen(self) -> None:
        """Answer, in the thread of the store, once some rank has asked."""
        if self._has_answered:
            return
        if self.why:
            self._store.compare_set(self._name, "", self.why)
        elif not self._store.check([self._name]):
            return
        with self._lock:
            self._has_answered, answer = True, self._next
        self._store.set(f"{self._name}/{self._rank}", str(answer))
        if self._store.add(f"{self._name}/answers", 1) == self._ranks:
            answers = [int(self._store.get(f"{self._name}/{r}")) for r in range(self._ranks)]
            self._store.set(f"{self._name}/place", str(max(answers)))

    def comes(self) -> bool:
        """Come to the next place; return whether all ranks stop there.

        Raises:
            RankFailedError: A rank has ended, or has failed.
            RuntimeError: The store has ended.
        """
        if self.why and not self._has_answered:
            self._ask_store(self.listen)
        with self._lock:
            here = self._next
            if not self._has_answered:
                self._next += 1
                return False
        looked_at = time.monotonic()
        while self._all_stop_at is None:
            self._all_stop_at = self._ask_store(self._read)
            if time.monotonic() > looked_at + LOOK_EVERY_S:
                self._check()
                looked_at = time.monotonic()
            time.sleep(0.02)
        self._next += 1
        return here == self._all_stop_at

    def _ask_store(self, operation: Callable[[], Any]) -> Any:
        while True:
            try:
                return self._talk.ask(operation)
            except TimeoutError:  # the watch ends this process if the store stays silent
                self._check()

    def _read(self) -> int | None:
        if not self._store.check([place := f"{self._name}/place"]):
            return None
        self.why = self._store.get(self._name).decode()
        return int(self._store.get(place))
