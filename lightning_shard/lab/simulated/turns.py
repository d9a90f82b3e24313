"""Lets ranks, each a thread, run one at a time; they take turns where one waits for others."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch

from lightning_shard.lab.simulated.state import State
from lightning_shard.processes.errors import StuckError

Ready = Callable[[], bool]


class _OthersFailedError(BaseException):
    """Ends a rank after another one has failed; no code is meant to catch it."""


class Turns:
    """The ranks of a simulation.

    A rank runs until it waits for something that is not there yet. Then the next one runs that can:
    in the order of the ranks, and from the last on with the first. So a program runs in the same
    order whenever it is run.

    Attributes:
        values: The values that the ranks returned.
    """

    def __init__(self, bodies: list[Callable[[], Any]]) -> None:
        """Begin without a rank that runs."""
        self.values: list[Any] = [None] * len(bodies)
        self._bodies = bodies
        self._states: list[State] = []
        self._caller = threading.Semaphore(0)
        self._wake = [threading.Semaphore(0) for _ in bodies]
        self._waits: list[tuple[Ready, str] | None] = [(_is_ready, "its begin")] * len(bodies)
        self._failure: tuple[int, BaseException] | None = None
        self._threads: list[threading.Thread] = []

    def run(self, states: list[State]) -> None:
        """Run all ranks to their ends.

        Raises:
            BaseException: The error of the first rank that failed, with a note of its number.
        """
        own, self._states = State(), states
        for rank in range(len(self._bodies)):
            run = contextvars.copy_context().run
            thread = threading.Thread(target=run, args=(self._body, rank), name=f"rank {rank}")
            thread.daemon = True  # a rank that never returns must not keep the interpreter
            self._threads.append(thread)
            thread.start()
        self._states[0].use()
        self._wake[0].release()
        try:
            self._caller.acquire()
        except BaseException as error:  # Ctrl-C: the rank that runs goes on to where it waits
            self._failure = self._failure or (-1, error)
            self._caller.acquire()
        own.use()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            rank, error = self._failure
            if rank >= 0 and not isinstance(error, StuckError):
                error.add_note(f"This is rank {rank} of {len(self._bodies)} simulated ones.")
            raise error

    def is_thread_of(self, rank: int) -> bool:
        """Return whether the caller is the thread of that rank."""
        return threading.current_thread() is self._threads[rank]

    def wait(self, rank: int, ready: Ready, what: str) -> None:
        """Let other ranks run until `ready()`; `what` names what `rank` waits for.

        Raises:
            StuckError: All ranks wait, or have ended.
            RuntimeError: The caller is not the thread of that rank.
        """
        if not self.is_thread_of(rank):
            raise RuntimeError(
                f"{what} was called on rank {rank} in a thread of its own, "
                f"{threading.current_thread().name!r}; simulated ranks communicate in one thread."
            )
        while self._failure is None and not ready():
            self._waits[rank] = ready, what
            following = self._next(rank)
            if following is None:
                raise StuckError(self._all_that_wait())
            self._states[rank] = State()
            self._go_on(rank, following)
            self._wake[rank].acquire()
        if self._failure is not None:
            raise _OthersFailedError

    def give_way(self, rank: int) -> None:
        """Let each other rank that can go on run once before this one."""
        asked = iter([False])
        self.wait(rank, lambda: next(asked, True), "the others")

    def _body(self, rank: int) -> None:
        self._wake[rank].acquire()
        try:
            if self._failure is None:
                torch.set_num_threads(1)
                with torch.autograd.set_multithreading_enabled(False):
                    self.values[rank] = self._bodies[rank]()
        except _OthersFailedError:
            pass  # the caller is told by the rank that failed
        except BaseException as error:
            self._failure = self._failure or (rank, error)
        finally:
            self._waits[rank] = None
            following = self._following_one_that_ended(rank)
            if following is None:
                self._caller.release()
            else:
                self._go_on(rank, following)

    def _following_one_that_ended(self, rank: int) -> int | None:
        following = None
        try:
            following = self._next(rank)
            if following is None and any(self._waits):
                raise StuckError(self._all_that_wait())
        except BaseException as error:
            self._failure = self._failure or (rank, error)
            following = self._next(rank)
        return following

    def _next(self, rank: int) -> int | None:
        """The next rank that can go on; once one has failed all others can, to end."""
        count = len(self._bodies)
        for step in range(1, count + 1):
            other = (rank + step) % count
            waits = self._waits[other]
            if waits is not None and (self._failure is not None or waits[0]()):
                return other
        return None

    def _go_on(self, rank: int, following: int) -> None:
        self._states[following].use()
        self._wake[following].release()

    def _all_that_wait(self) -> str:
        return f"no rank can go on: {self._waiting()}."

    def _waiting(self) -> str:
        groups: dict[str, list[int]] = {}
        for rank, waits in enumerate(self._waits):
            groups.setdefault(f"waits for {waits[1]}" if waits else "has ended", []).append(rank)
        said = [f"rank {', '.join(map(str, ranks))} {what}" for what, ranks in groups.items()]
        return "; ".join(said)


def _is_ready() -> bool:
    return True
