"""When one rank fails, all end, and each says which rank it was: "rank N: reason".

Four things happen in one process group, each told through the store in which the ranks met:

- A rank that fails says so. The others have `GRACE_S` to end by themselves, then they are ended.
- A rank that is killed says nothing. A rank that has lost a connection, or waits for another one,
  sees whose process has ended or whose heartbeats stand still.
- A rank that is cut off from the store hears nothing. It ends once it has waited for `timeout_s`.
- A rank whose data worker is stopped may wait for it without a limit, so it fails, too.

The watch of a process group begins with the first stage of a Trainer. It rests between stages,
when a rank may end or be late, but hears of failures. A thread ends the process where all else
hangs.
"""

import atexit
import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_shard.processes.agreement import store_of_attempt
from lightning_shard.processes.failures.failure import (
    SIGTERM_CODE,
    STORE_GONE,
    Failure,
    RankFailedError,
    ended,
    is_lost_connection,
    note_first,
    unpacked,
)
from lightning_shard.processes.failures.heartbeats import Heartbeats
from lightning_shard.processes.failures.stopped_workers import STOPPED_S, StoppedWorkers
from lightning_shard.processes.failures.store_thread import ANSWER_S, StoreThread
from lightning_shard.processes.torch_private.internals import default_store
from lightning_shard.processes.variables import launcher_holds_store

POLL_S = 0.5
GRACE_S = 10.0  # for a rank to end by itself, once it or another has failed
AGREE_S = 2.0  # for all ranks to report the same failure, as after Ctrl-C
LOOK_S = 2.0  # for the reason of a lost connection to arrive, and for heartbeats to be compared
FAREWELL_S = 2 * POLL_S  # for the others to hear that rank 0 ends, and its store
_runs = itertools.count()  # the ranks begin their watches in the same order
_resting: list["FailureWatch"] = []  # of this process, at most one


def watch_ranks(rank: int, *, timeout_s: float) -> "FailureWatch":
    """The watch of the process group, which may have rested since an earlier stage.

    Args:
        rank: The rank of this process.
        timeout_s: Seconds without an answer of the store, after which this process ends.
    """
    if _resting:
        watch = _resting.pop()
        if watch.group_store is default_store():
            watch.wake(timeout_s)
            return watch
        watch.close()  # of a group that is no more
    return FailureWatch(rank, timeout_s=timeout_s)


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
        self.heard: Failure | None = None  # the first failure of the run
        self.group_store = default_store()  # lives as long as it is watched
        self._ranks = dist.get_world_size()
        self._timeout_s = timeout_s
        self.rests = False  # between stages
        self._lost = 0  # ranks that are not reached any more
        self._prefix = f"run_{next(_runs)}"
        self._store = store_of_attempt().clone()  # the first connection may be busy waiting
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        self._hearts = Heartbeats(self._store, self._prefix, rank, self._ranks)
        self._closed = threading.Event()
        self._last_moment: float | None = None  # when this process is ended
        self._code = 1
        self._talk = StoreThread(self._beat, every_s=POLL_S)
        threading.Thread(target=self._guard, daemon=True, name="failure-guard").start()
        atexit.register(self._part)

    def check(self, waited_for: Sequence[int]) -> None:
        """Call it every second while waiting for ranks.

        Raises:
            RankFailedError: One of them has ended, or any rank has failed.
        """
        lost: list[int] = []
        if self.heard is None:
            with contextlib.suppress(RuntimeError, TimeoutError):  # which who waits finds, too
                lost = self._talk.ask(lambda: self._hearts.lost(waited_for))
        if lost:
            time.sleep(2 * POLL_S)  # it may have said why
        if self.heard or lost:
            raise RankFailedError(self.heard or ended(lost))

    def reported_alone(self, error: BaseException | None) -> bool:
        """Report that this rank fails; whether others do not, so that no collective may begin.

        The error gets a note that names the rank that failed first.
        """
        self._last_moment = time.monotonic() + AGREE_S + GRACE_S
        lost = is_lost_connection(error) or isinstance(error, RankFailedError)
        failure = Failure(self.rank, f"rank {self.rank}: {type(error).__name__}: {error}")
        try:
            self._lost = int(lost)
            if isinstance(error, RankFailedError):
                failure = error.failure
            elif lost:
                failure = self._reason_of_lost_connection() or failure
            first = self._tell(failure)
            alone = first.code == SIGTERM_CODE or self._others_go_on(lost) or lost
        except (RuntimeError, TimeoutError):  # the store is gone, or does not answer
            of_store = STORE_GONE if lost and self.rank and not launcher_holds_store() else None
            first = self.heard = self.heard or of_store or failure
            alone = True
        self._last_moment = time.monotonic() + GRACE_S if alone else None
        if alone and error is not None:
            note_first(error, first.text)
            self._say_at_exit()
        return alone

    def leave(self, text: str, code: int) -> Failure:
        """Tell all ranks to end, and why; return what was first told to all.

        Args:
            text: The reason.
            code: The exit status of all ranks.
        """
        self._code = code
        self._last_moment = time.monotonic() + GRACE_S
        failure = Failure(self.rank, f"rank {self.rank}: {text}", code)
        try:
            first = self._tell(failure, 2 * POLL_S)
        except (RuntimeError, TimeoutError):
            first = self.heard = self.heard or failure
        self._say_at_exit()
        return first

    def rest(self) -> None:
        """End a stage on all ranks: until the next one this process waits for no other."""
        self.rests = True
        if self not in _resting:
            _resting.append(self)

    def wake(self, timeout_s: float) -> None:
        """Begin another stage."""
        self._timeout_s, self.rests = timeout_s, False
        self._talk.answered = max(self._talk.answered, time.monotonic())
        self._hearts.forget()

    def close(self) -> None:
        """End the watch; the process may go on, or end by itself."""
        self._last_moment = None
        self._closed.set()
        self._talk.close()
        atexit.unregister(self._part)
        if self in _resting:
            _resting.remove(self)

    def _others_go_on(self, lost: bool) -> bool:
        """Whether some rank does not report a failure within `AGREE_S`, as it does after Ctrl-C.

        What the first rank finds holds for all, also for one that comes later. Where a connection
        is lost that is known. Only rank 0, which may hold the store, then waits, so that the ranks
        that are left read in it.
        """
        failed, left = f"{self._prefix}/failed", f"{self._prefix}/left"
        self._talk.ask(lambda: self._store.add(left if lost else failed, 1))
        if lost:
            self._found("some go on")
        deadline = time.monotonic() + (2 * LOOK_S if lost else AGREE_S)
        while not (lost and self.rank) and time.monotonic() < deadline:
            count = self._talk.ask(lambda: self._store.add(failed, 0))
            if lost:
                count += self._talk.ask(lambda: self._store.add(left, 0))
            if count >= self._ranks - self._lost:
                return lost or self._found("all failed") != "all failed"
            time.sleep(0.05)
        return self._found("some go on") != "all failed"

    def _found(self, what: str) -> str:
        """What was found first, by this rank or another."""
        key = f"{self._prefix}/found"
        return self._talk.ask(lambda: self._store.compare_set(key, "", what)).decode()

    def _reason_of_lost_connection(self) -> Failure | None:
        """What another rank has said, or whose heart stands still; None where neither is known."""
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
        self._lost = max(1, len(silent))
        return self.heard or (ended(silent) if silent else None)

    def _beat(self) -> None:
        self._hearts.beat()
        if self.heard is None and self._store.check([f"{self._prefix}/reason"]):
            failure = unpacked(self._store.get(f"{self._prefix}/reason"))
            self.heard = failure
            self._last_moment = self._last_moment or time.monotonic() + GRACE_S
            self._code = failure.code
            if failure.code == SIGTERM_CODE and failure.rank != self.rank:
                self._say(self._why()) if self.rests else self._say_at_exit()
                os.kill(os.getpid(), signal.SIGTERM)
        if self.rests and self._store.check([f"{self._prefix}/rank_0_ends"]):
            self._store.add(f"{self._prefix}/ended", 1)
            self._talk.close()  # before torch logs that the store is not reached

    def _tell(self, failure: Failure, limit_s: float = ANSWER_S) -> Failure:
        """Tell all ranks, unless one was first; return what was told first."""
        key, told = f"{self._prefix}/reason", failure.packed()
        first = self._talk.ask(lambda: self._store.compare_set(key, "", told), limit_s)
        self.heard = unpacked(first)
        return self.heard

    def _guard(self) -> None:
        """End this process where nothing else does."""
        workers = StoppedWorkers(POLL_S)
        while not self._closed.wait(POLL_S):
            now = time.monotonic()
            if self._last_moment is None and (worker := workers.found()) is not None:
                self.leave(
                    f"its data worker, process {worker}, has been stopped for {STOPPED_S:.0f} s", 1
                )
                self._last_moment = time.monotonic() + AGREE_S
            if not self.rests and now > self._talk.answered + self._timeout_s + ANSWER_S:
                self._end(f"the store, at rank 0, has not answered for {self._timeout_s:.0f} s")
            if self._last_moment is not None and now > self._last_moment:
                self._end(self._why())

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
        atexit.unregister(self._limit_exit)
        atexit.register(self._limit_exit)

    def _limit_exit(self) -> None:
        """Say why, below all else, and limit what else runs at the end of the process."""
        for child in multiprocessing.active_children():
            if child.daemon:  # a data worker; where it is stopped, SIGTERM would not end it
                child.kill()
        self._talk.close()
        self._talk.join()
        self._say(self._why())
        self._last_moment = time.monotonic() + GRACE_S
        self._closed.clear()
        threading.Thread(target=self._guard, daemon=True, name="failure-guard").start()

    def _why(self) -> str:
        alone = "it failed, and did not end by itself"
        return self.heard.told_by(self.rank) if self.heard else alone

    def _end(self, why: str) -> None:
        self._say(why)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(self._code)

    def _say(self, why: str) -> None:
        sys.stderr.write(f"[rank {self.rank}] ended, because {why}\n")
        sys.stderr.flush()
