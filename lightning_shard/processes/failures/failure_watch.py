"""When one rank fails, all end, and each says which rank it was: "rank N: reason".

Three things happen in one process group, each told through the store in which the ranks met:

- A rank that fails says so. The others have `GRACE_S` to end by themselves, then they are ended.
- A rank that is killed says nothing. A rank that has lost a connection, or waits for another one,
  sees whose process has ended or whose heartbeats have stopped.
- A rank that is cut off from the store hears nothing. It ends once it has waited for `timeout_s`.

The watch of a process group begins with the first stage of a Trainer. It rests between stages,
when a rank may end or be late, but hears of failures.
"""

import atexit
import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_shard.processes.failures.common_place import CommonPlace
from lightning_shard.processes.failures.failure import (
    LEFT,
    SIGTERM,
    SIGTERM_CODE,
    STORE_GONE,
    Failure,
    RankFailedError,
    ended,
    is_lost_connection,
    note_first,
)
from lightning_shard.processes.failures.first_failure import AGREE_S, FirstFailure
from lightning_shard.processes.failures.guard import Guard
from lightning_shard.processes.failures.heartbeats import Heartbeats
from lightning_shard.processes.failures.linux_processes import ended_among
from lightning_shard.processes.failures.store_thread import ANSWER_S, StoreThread
from lightning_shard.processes.store import store_of_attempt
from lightning_shard.processes.torch_private.internals import default_store
from lightning_shard.processes.variables import launcher_holds_store

POLL_S = 0.5
GRACE_S = 10.0  # for a rank to end by itself, once it or another has failed
LOOK_S = 2.0  # for the reason of a lost connection to arrive, and for heartbeats to be compared
FAREWELL_S = 2 * POLL_S  # for the others to hear that rank 0 ends, and its store
_runs = itertools.count()  # the ranks begin their watches in the same order
_open: list["FailureWatch"] = []  # all of this process; at most one of them rests


def watch_ranks(rank: int, *, timeout_s: float) -> "FailureWatch":
    """Return the watch of the process group, which may have rested since an earlier stage.

    Args:
        rank: The rank of this process.
        timeout_s: Seconds without an answer of the store, after which this process ends.
    """
    for watch in [watch for watch in _open if watch.rests]:
        if watch.group_store is default_store():
            watch.wake(timeout_s)
            return watch
        watch.close()  # its group is no more
    return FailureWatch(rank, timeout_s=timeout_s)


def check_ranks(waited_for: Sequence[int]) -> None:
    """Look whether ranks still come; call it now and then in a wait.

    In a script, where nobody watches them, the processes of this machine are looked at.

    Args:
        waited_for: The global ranks, without this one.

    Raises:
        RankFailedError: One of them has ended, or any rank has failed.
    """
    watches = [w for w in _open if not w.rests and w.group_store is default_store()]
    for watch in watches:
        watch.check(waited_for)
    if not watches and is_of_processes() and (left := ended_among(store_of_attempt(), waited_for)):
        raise RankFailedError(ended(left, LEFT))


def tell_end(why: str) -> None:
    """Tell the other ranks why this process ends now, where they are watched.

    Args:
        why: A clause that begins with "it".
    """
    for watch in _open:
        if watch.group_store is default_store():
            watch.tell_end(why)


def is_of_processes() -> bool:
    """Return whether the store of the process group joins processes.

    A store in the memory of this process joins its threads, which all end with it.
    """
    store = default_store()
    while isinstance(store, dist.PrefixStore):  # pyright: ignore[reportPrivateImportUsage]
        store = store.underlying_store
    # torch documents both
    return isinstance(store, dist.TCPStore | dist.FileStore)  # pyright: ignore[reportPrivateImportUsage]


class FailureWatch:
    """Watches the ranks of the default process group, in threads, until `close`."""

    def __init__(self, rank: int, *, timeout_s: float = 1800.0) -> None:
        """Begin; all ranks do.

        Args:
            rank: The rank of this process.
            timeout_s: Seconds without an answer of the store, after which this process ends.
        """
        self.rank = rank
        self.group_store = default_store()  # lives as long as it is watched
        self.rests = False  # between stages
        self._is_interrupted = False
        self._ranks = dist.get_world_size()
        self._timeout_s = timeout_s
        self._prefix = f"run_{next(_runs)}"
        self._counts, self._place = 0, None
        self._store = store_of_attempt().clone()  # the first connection may be busy waiting
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        self._hearts = Heartbeats(self._store, self._prefix, rank, self._ranks)
        self._first = FirstFailure(self._store, self._prefix, rank, self._ranks)
        self._guard = Guard(rank, self._look, self._why, every_s=POLL_S)
        self._guard_of_exit: Guard | None = None
        self._talk = StoreThread(self._beat, every_s=POLL_S)
        self._guard.start()  # now, since it reads when the store last answered
        atexit.register(self._part)
        _open.append(self)

    @property
    def heard(self) -> Failure | None:
        """The first failure of the run; None as long as this rank has heard of none."""
        return self._first.heard

    def check(self, waited_for: Sequence[int]) -> None:
        """Look whether ranks still come; call it every second while waiting for them.

        Raises:
            RankFailedError: One of them has ended, or any rank has failed.
        """
        lost: list[int] = []
        if self.heard is None:
            with contextlib.suppress(RuntimeError, TimeoutError):  # the one who waits finds it, too
                lost = self._talk.ask(lambda: self._hearts.lost(waited_for))
        if lost:
            time.sleep(2 * POLL_S)  # it may have said why
        if self.heard or lost:
            raise RankFailedError(self.heard or ended(lost))

    def common_place(self) -> CommonPlace:
        """Begin to count places at which all ranks may stop; the count before ends.

        All ranks call this, equally often.
        """
        others = [rank for rank in range(self._ranks) if rank != self.rank]
        name = f"{self._prefix}/places_{self._counts}"
        place = CommonPlace(
            self._store, name, self.rank, self._ranks,
            talk=self._talk, check=lambda: self.check(others),
        )  # fmt: skip
        self._counts, self._place = self._counts + 1, place
        return place

    def reported_alone(self, error: BaseException | None) -> bool:
        """Report that this rank fails; return whether others go on, so that collectives would hang.

        The error gets a note that names the rank that failed first.
        """
        self._guard.end_within(AGREE_S + GRACE_S)
        lost = is_lost_connection(error) or isinstance(error, RankFailedError)
        failure = Failure.of(self.rank, error)
        try:
            gone = int(lost)  # ranks that are not reached any more
            if isinstance(error, RankFailedError):
                failure = error.failure
            elif lost:
                reason, gone = self._reason_of_lost_connection()
                failure = reason or failure
            first = self._first.tell(self._talk, failure)
            alone = first.at_once or self._first.some_go_on(self._talk, gone) or lost
        except (RuntimeError, TimeoutError):  # the store is gone, or does not answer
            of_store = STORE_GONE if lost and self.rank and not launcher_holds_store() else None
            first = self._first.heard = self.heard or of_store or failure
            alone = True
        self._guard.code = first.code
        self._guard.end_within(GRACE_S if alone else None)
        if alone and error is not None:
            self._is_interrupted = isinstance(error, KeyboardInterrupt)
            if not self._is_interrupted:
                note_first(error, first.text)
            self._say_at_exit()
        return alone

    def tell_end(self, why: str) -> None:
        """Tell all ranks why this one ends now, and let them hear it before they lose it."""
        failure = Failure(self.rank, f"rank {self.rank}: {why}")
        with contextlib.suppress(RuntimeError, TimeoutError):  # its own line says it, too
            self._first.tell(self._talk, failure)
            self._first.wait_until_heard(self._talk)

    def leave(self) -> None:
        """Tell all ranks to end at once, because of SIGTERM on this one, before they lose it."""
        self._guard.code = SIGTERM_CODE
        self._guard.end_within(GRACE_S)
        failure = Failure(self.rank, f"rank {self.rank}: {SIGTERM}", at_once=True)
        try:
            self._first.tell(self._talk, failure, 2 * POLL_S)
            self._first.wait_until_heard(self._talk)
        except (RuntimeError, TimeoutError):
            self._first.heard = self.heard or failure
        self._say_at_exit()

    def rest(self) -> None:
        """End a stage on all ranks: until the next one this process waits for no other."""
        self.rests = True

    def wake(self, timeout_s: float) -> None:
        """Begin another stage."""
        self._timeout_s, self.rests = timeout_s, False
        self._talk.answered = max(self._talk.answered, time.monotonic())
        self._hearts.forget()

    def close(self) -> None:
        """End the watch; the process may go on, or end by itself."""
        self._guard.close()
        self._talk.close()
        atexit.unregister(self._part)
        if self in _open:
            _open.remove(self)

    def _reason_of_lost_connection(self) -> tuple[Failure | None, int]:
        """Find out which rank is lost.

        Returns:
            The failure that another rank reported, or the rank whose process has ended or whose
            heartbeats have stopped, or None if neither is known; and how many ranks are lost.
        """
        before = self._talk.ask(self._hearts.counts)
        silent: list[int] = []
        for _ in range(2):  # once more where one is silent: a busy machine stops threads, too
            deadline = time.monotonic() + LOOK_S
            while self.heard is None and time.monotonic() < deadline:
                time.sleep(0.05)
            silent = self._talk.ask(lambda: self._hearts.ended(range(self._ranks)))
            if self.heard or silent:
                break
            silent = self._talk.ask(lambda: self._hearts.silent_since(before))
            if not silent:
                break
        return self.heard or (ended(silent) if silent else None), max(1, len(silent))

    def _beat(self) -> None:
        """Count a heartbeat in the store, and hear whether a rank has failed or rank 0 ends."""
        self._hearts.beat()
        if self._place is not None:
            self._place.listen()
        if self._first.listen() and (failure := self.heard) is not None:
            if not self._guard.counts_down:
                self._guard.end_within(GRACE_S)
            self._guard.code = failure.code
            if failure.at_once and failure.rank != self.rank:
                self._guard.say(self._why()) if self.rests else self._say_at_exit()
                os.kill(os.getpid(), signal.SIGTERM)
        if self.rests and self._store.check([f"{self._prefix}/rank_0_ends"]):
            self._store.add(f"{self._prefix}/ended", 1)
            self._talk.close()  # before torch logs that the store is not reached

    def _look(self) -> None:
        """Let this process end where the store is silent."""
        silent_s = time.monotonic() - self._talk.answered
        if not self.rests and silent_s > self._timeout_s + ANSWER_S:
            self._guard.end(f"the store, at rank 0, has not answered for {self._timeout_s:.0f} s")

    def _part(self) -> None:
        """End the watch with the process. Rank 0 lets the others hear it before its store ends."""
        holds = self.rank == 0 and not launcher_holds_store()
        key = f"{self._prefix}/ended"
        with contextlib.suppress(RuntimeError, TimeoutError):
            if holds and self.heard is None:
                self._talk.ask(lambda: self._store.set(f"{self._prefix}/rank_0_ends", ""), POLL_S)
            gone = self._talk.ask(lambda: self._store.add(key, 1), POLL_S)
            deadline = time.monotonic() + FAREWELL_S
            while holds and gone < self._ranks and time.monotonic() < deadline:
                time.sleep(0.02)
                gone = self._talk.ask(lambda: self._store.add(key, 0), POLL_S)
        self.close()
        self._talk.join()

    def _say_at_exit(self) -> None:
        if self._guard_of_exit is None:  # now, since Python 3.12 begins no thread at the exit
            self._guard_of_exit = Guard(self.rank, lambda: None, self._why, every_s=POLL_S)
            self._guard_of_exit.start()
        atexit.unregister(self._limit_exit)
        atexit.register(self._limit_exit)

    def _limit_exit(self) -> None:
        """Say why, below all else, and limit what else runs at the end of the process."""
        for child in multiprocessing.active_children():
            if child.daemon:  # a data worker; where it is stopped, SIGTERM would not end it
                child.kill()
        StoreThread.end_all()  # each may make torch log
        if not self._is_interrupted:  # else the user has ended this rank, and knows
            self._guard.say(self._why())
        if self._guard_of_exit is not None:
            self._guard_of_exit.code = self._guard.code
            self._guard_of_exit.end_within(GRACE_S)

    def _why(self) -> str:
        alone = "it failed, and did not end by itself"
        return self.heard.reason_for(self.rank) if self.heard else alone
