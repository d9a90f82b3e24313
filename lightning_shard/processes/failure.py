"""When one rank fails, all end, and each says which rank it was: "rank N: reason".

Three things happen in one process group, each told through the store in which the ranks met:

- A rank that fails says so. The others have `GRACE_S` to end by themselves, then they are ended.
- A rank that is killed says nothing. Every rank counts its heartbeats in the store, so a rank that
  has lost a connection sees whose count stands still.
- A rank that is cut off from the store hears nothing. It ends once it has waited for `timeout_s`.

Only one thread talks to the store, since an operation on a dead connection never returns. Whoever
needs an answer waits for it with a limit, and another thread ends the process where all else hangs.
"""

import atexit
import itertools
import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_shard.processes.agreement import store_of_attempt
from lightning_shard.processes.device import DEVICES

POLL_S = 0.5
GRACE_S = 10.0  # for a rank to end by itself, once it or another has failed
AGREE_S = 2.0  # for all ranks to report the same failure, as after Ctrl-C
LOOK_S = 2.0  # for the reason of a lost connection to arrive, and for heartbeats to be compared
ANSWER_S = 3.0  # for the store to answer
SIGTERM_CODE = 128 + signal.SIGTERM
_runs = itertools.count()  # the ranks begin their watches in the same order
# of torch's store and of collectives, whose errors are plain RuntimeErrors in some releases
_LOST = ["Connection closed by peer", "Connection reset by peer"]
_LOST += [words for row in DEVICES for words in row.lost]


@dataclass(frozen=True)
class Failure:
    """Why a run ends.

    Attributes:
        rank: The rank that failed.
        text: "rank 1: ValueError: ...".
        code: The exit status of all ranks.
    """

    rank: int
    text: str
    code: int = 1


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, says no more than that another rank is not reached."""
    while error is not None:
        lost = isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)
        if lost or isinstance(error, dist.DistError):
            return True
        error = error.__cause__
    return False


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
        self._ranks = dist.get_world_size()
        self._timeout_s = timeout_s
        self._prefix = f"run_{next(_runs)}"
        self._store = store_of_attempt().clone()  # the first connection may be busy waiting
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        self._tasks = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]()
        self._closed = threading.Event()
        self._answered = time.monotonic()
        self._last_moment: float | None = None  # when this process is ended
        self._code = 1
        for name, body in (("talk", self._talk), ("guard", self._guard)):
            threading.Thread(target=body, daemon=True, name=f"failure-{name}").start()

    def reported_alone(self, error: BaseException | None) -> bool:
        """Report that this rank fails; whether others do not, so that no collective may begin.

        The error gets a note that names the rank that failed first.
        """
        self._last_moment = time.monotonic() + AGREE_S + GRACE_S
        lost = is_lost_connection(error)
        failure = Failure(self.rank, f"rank {self.rank}: {type(error).__name__}: {error}")
        try:
            if lost:
                failure = self._reason_of_lost_connection() or failure
            first = self._tell(failure)
            alone = first.code == SIGTERM_CODE or self._others_go_on(lost) or lost
        except (RuntimeError, TimeoutError):  # the store is gone, or does not answer
            first = self.heard = self.heard or self._failure_of_store() or failure
            alone = True
        self._last_moment = time.monotonic() + GRACE_S if alone else None
        if alone and error is not None:
            _note(error, first.text)
            atexit.register(self._limit_exit)
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
            return self._tell(failure, 2 * POLL_S)
        except (RuntimeError, TimeoutError):
            return self.heard or failure

    def close(self) -> None:
        """End the watch; the process may go on, or end by itself."""
        self._last_moment = None
        self._closed.set()

    def _others_go_on(self, lost: bool) -> bool:
        """Whether some rank does not report a failure within `AGREE_S`, as it does after Ctrl-C.

        Where a connection is lost that is known. Only rank 0, which may hold the store, then waits,
        so that the ranks that are left read in it.
        """
        self._ask(lambda: self._store.add(f"{self._prefix}/failures", 1))
        deadline = time.monotonic() + (2 * LOOK_S if lost else AGREE_S)
        expected = self._ranks - lost
        while not (lost and self.rank) and time.monotonic() < deadline:
            if self._ask(lambda: self._store.add(f"{self._prefix}/failures", 0)) >= expected:
                return False
            time.sleep(0.05)
        return True

    def _reason_of_lost_connection(self) -> Failure | None:
        """What another rank has said, or whose heart stands still; None where neither is known."""
        before = self._ask(self._beats)
        silent: list[int] = []
        for _ in range(2):  # once more where one is silent: a busy machine stops threads, too
            deadline = time.monotonic() + LOOK_S
            while self.heard is None and time.monotonic() < deadline:
                time.sleep(0.05)
            silent = self._silent_since(before)
            if self.heard or not silent:
                break
        if self.heard or not silent:
            return self.heard
        names = " and ".join(str(rank) for rank in silent)
        text = "ended without a word (it was killed, or called exit), or is not reached any more"
        return Failure(silent[0], f"rank {names}: {text}")

    def _silent_since(self, before: list[int]) -> list[int]:
        return [
            rank
            for rank, (old, new) in enumerate(zip(before, self._ask(self._beats), strict=True))
            if old == new and rank != self.rank
        ]

    def _failure_of_store(self) -> Failure | None:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or self.rank == 0:
            return None
        return Failure(0, "rank 0: ended, or is not reached any more: its store does not answer")

    def _ask(self, operation: Callable[[], Any], limit_s: float = ANSWER_S) -> Any:
        answer = Future[Any]()
        self._tasks.put((operation, answer))
        return answer.result(limit_s)

    def _talk(self) -> None:
        """Do what is asked of the store, and at each beat look for a failure."""
        next_beat = 0.0
        while not self._closed.is_set():
            try:
                operation, answer = self._tasks.get(timeout=max(0, next_beat - time.monotonic()))
            except queue.Empty:
                next_beat = time.monotonic() + POLL_S
                operation, answer = self._beat, Future[Any]()
            try:
                answer.set_result(operation())
                self._answered = time.monotonic()
            except (RuntimeError, ConnectionError) as err:
                answer.set_exception(RuntimeError(str(err)))
                if "timeout" not in str(err).lower():
                    self._answered = float("inf")  # the store has ended: no silence to wait for
                    self._refuse_all()
                    return

    def _refuse_all(self) -> None:
        while not self._closed.wait(0.05):
            while not self._tasks.empty():
                self._tasks.get()[1].set_exception(RuntimeError("the store has ended"))

    def _beat(self) -> None:
        self._store.add(f"{self._prefix}/beat_{self.rank}", 1)
        if self.heard is None and self._store.check([f"{self._prefix}/reason"]):
            failure = Failure(*json.loads(self._store.get(f"{self._prefix}/reason")))
            self.heard = failure
            self._last_moment = self._last_moment or time.monotonic() + GRACE_S
            self._code = failure.code
            if failure.code == SIGTERM_CODE and failure.rank != self.rank:
                self._say(f"another rank failed first: {failure.text}")
                os.kill(os.getpid(), signal.SIGTERM)

    def _beats(self) -> list[int]:
        return [self._store.add(f"{self._prefix}/beat_{r}", 0) for r in range(self._ranks)]

    def _tell(self, failure: Failure, limit_s: float = ANSWER_S) -> Failure:
        """Tell all ranks, unless one was first; return what was told first."""
        told = json.dumps([failure.rank, failure.text, failure.code])
        key = f"{self._prefix}/reason"
        first = self._ask(lambda: self._store.compare_set(key, "", told), limit_s)
        self.heard = Failure(*json.loads(first))
        return self.heard

    def _guard(self) -> None:
        """End this process where nothing else does."""
        while not self._closed.wait(POLL_S):
            now = time.monotonic()
            if now > self._answered + self._timeout_s + ANSWER_S:
                self._end(f"the store, at rank 0, has not answered for {self._timeout_s:.0f} s")
            if self._last_moment is not None and now > self._last_moment:
                self._end(self._why())

    def _limit_exit(self) -> None:
        """Let what runs at exit, as joining a data worker that is stopped, take `GRACE_S`."""
        self._say(self._why())  # below what torch's store logs
        self._last_moment = time.monotonic() + GRACE_S
        self._closed.clear()
        threading.Thread(target=self._guard, daemon=True, name="failure-guard").start()

    def _why(self) -> str:
        if self.heard is None:
            return "it failed, and did not end by itself"
        return f"{'it' if self.heard.rank == self.rank else 'another rank'} failed first: " + (
            self.heard.text
        )

    def _end(self, why: str) -> None:
        self._say(why)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(self._code)

    def _say(self, why: str) -> None:
        sys.stderr.write(f"[rank {self.rank}] ended, because {why}\n")
        sys.stderr.flush()


def _note(error: BaseException, text: str) -> None:
    note = f"The run ends, because one rank failed first: {text}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
