"""The failure that ends a run: the first that any rank writes into the store, and all read."""

import time
from contextlib import suppress
from typing import Any

from lightning_shard.processes.failures.failure import Failure, unpacked
from lightning_shard.processes.failures.store_thread import ANSWER_S, StoreThread

AGREE_S = 2.0  # for all ranks to report a failure, as after Ctrl-C
HEARD_S = 4.0  # for all ranks to hear that they end at once, on a busy machine
LOST_S = 4.0  # for the ranks that have lost a connection to report it, while rank 0 keeps the store


class FirstFailure:
    """The first failure of a run, as this rank knows it.

    Attributes:
        heard: The first failure; None as long as this rank has heard of none.
    """

    def __init__(self, store: Any, prefix: str, rank: int, ranks: int) -> None:
        """Begin; all ranks do."""
        self.heard: Failure | None = None
        self._store, self._prefix, self._rank, self._ranks = store, prefix, rank, ranks
        self._heard = f"{prefix}/heard"  # how many ranks have

    def listen(self) -> bool:
        """Read, in the thread of the store, what was told; return whether it is new."""
        if self.heard is None and self._store.check([f"{self._prefix}/reason"]):
            self._hear(self._store.get(f"{self._prefix}/reason"))
            return True
        return False

    def tell(self, talk: StoreThread, failure: Failure, limit_s: float = ANSWER_S) -> Failure:
        """Tell all ranks of a failure, unless one was told before; return what was told first.

        Raises:
            RuntimeError: The store has ended.
            TimeoutError: The store does not answer within `limit_s`.
        """
        packed = failure.packed()
        return talk.ask(lambda: self._hear(self._set_once("reason", packed)), limit_s)

    def wait_until_heard(self, talk: StoreThread) -> None:
        """Wait until all ranks have heard, or `HEARD_S`: those who have ended never do.

        Raises:
            RuntimeError: The store has ended.
            TimeoutError: The store does not answer.
        """
        self._wait_for_all(talk, self._heard, HEARD_S)

    def _wait_for_all(self, talk: StoreThread, name: str, limit_s: float) -> None:
        """Wait until all ranks have counted themselves under a name, or `limit_s`."""
        deadline = time.monotonic() + limit_s
        while talk.ask(lambda: self._store.add(name, 0)) < self._ranks:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def some_go_on(self, talk: StoreThread, lost: int) -> bool:
        """Return whether some rank reports no failure within `AGREE_S`, as each does after Ctrl-C.

        The answer that the first rank finds holds for all, also for one that comes later. Where a
        connection is lost it is known. Rank 0, which may hold the store, waits until the ranks that
        are left have read in it.

        Args:
            talk: The thread that talks to the store.
            lost: Number of ranks that are not reached any more; 0: no connection is lost.

        Raises:
            RuntimeError: The store has ended.
            TimeoutError: The store does not answer.
        """
        failed, left = f"{self._prefix}/failed", f"{self._prefix}/left"
        talk.ask(lambda: self._store.add(left if lost else failed, 1))
        if lost:
            talk.ask(lambda: self._set_once("found", "some go on"))
        deadline = time.monotonic() + (LOST_S if lost else AGREE_S)
        while not (lost and self._rank) and time.monotonic() < deadline:
            count = talk.ask(lambda: self._store.add(failed, 0))
            if lost:
                count += talk.ask(lambda: self._store.add(left, 0))
            if count >= self._ranks - lost:
                if lost:
                    return True
                go_on = self._found(talk, "all failed") != "all failed"
                self._wait_until_all_know(talk)
                return go_on
            time.sleep(0.05)
        return self._found(talk, "some go on") != "all failed"

    def _wait_until_all_know(self, talk: StoreThread) -> None:
        """Let rank 0 wait until all ranks have found the answer, or `AGREE_S`."""
        know = f"{self._prefix}/know"
        with suppress(RuntimeError, TimeoutError):  # rank 0 has gone, and this rank has its answer
            talk.ask(lambda: self._store.add(know, 1))
            if self._rank == 0:
                self._wait_for_all(talk, know, AGREE_S)

    def _found(self, talk: StoreThread, answer: str) -> str:
        """Return the answer that was found first, by this rank or another."""
        return talk.ask(lambda: self._set_once("found", answer)).decode()

    def _hear(self, packed: bytes) -> Failure:
        if self.heard is None:
            self.heard = unpacked(packed)
            self._store.add(self._heard, 1)
        return self.heard

    def _set_once(self, name: str, value: str) -> bytes:
        return self._store.compare_set(f"{self._prefix}/{name}", "", value)
