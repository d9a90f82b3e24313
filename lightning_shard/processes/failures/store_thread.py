"""A thread that alone talks to the store, so that nobody else waits for it without a limit.

An operation on a dead connection never returns.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

ANSWER_S = 3.0  # for the store to answer
_threads = weakref.WeakSet["StoreThread"]()  # all in this process


class StoreThread:
    """Runs operations on the store, and `beat` every `every_s`, until `close`.

    Attributes:
        answered: The reading of `time.monotonic` when the store last answered; infinite once it has
            ended, since no silence is then to be waited for.
    """

    def __init__(self, beat: Callable[[], None], *, every_s: float) -> None:
        self._beat, self._every_s = beat, every_s
        self._tasks = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]()
        self._closed = threading.Event()
        self.answered = time.monotonic()
        self._thread = threading.Thread(target=self._talk, daemon=True, name="failure-talk")
        self._thread.start()
        _threads.add(self)

    def ask(self, operation: Callable[[], Any], limit_s: float = ANSWER_S) -> Any:
        """Run `operation` in the thread and return its result.

        Raises:
            RuntimeError: The store has ended, or this thread.
            TimeoutError: There is no answer yet.
        """
        answer = Future[Any]()
        self._tasks.put((operation, answer))
        if self._closed.is_set():
            raise RuntimeError("nobody talks to the store any more")
        return answer.result(limit_s)

    def close(self) -> None:
        """End the thread after the operation that is going on."""
        self._closed.set()
        self._tasks.put((lambda: None, Future[Any]()))  # wakes the thread

    def join(self) -> None:
        """Wait for the thread, so that none is inside of torch when the interpreter ends."""
        if threading.current_thread() is not self._thread:
            self._thread.join(ANSWER_S)

    @staticmethod
    def end_all() -> None:
        """End each of these threads: torch logs a page where one asks a store that is gone."""
        threads = [*_threads]
        for thread in threads:
            thread.close()
        for thread in threads:
            thread.join()

    def _talk(self) -> None:
        next_beat = 0.0
        while not self._closed.is_set():
            try:
                operation, answer = self._tasks.get(timeout=max(0, next_beat - time.monotonic()))
            except queue.Empty:
                next_beat = time.monotonic() + self._every_s
                operation, answer = self._beat, Future[Any]()
            try:
                answer.set_result(operation())
                self.answered = time.monotonic()
            except (RuntimeError, ConnectionError) as err:
                answer.set_exception(RuntimeError(str(err)))
                if "timeout" not in str(err).lower():
                    self.answered = float("inf")
                    self._refuse_all()
                    return

    def _refuse_all(self) -> None:
        while not self._closed.wait(0.05):
            while not self._tasks.empty():
                self._tasks.get()[1].set_exception(RuntimeError("the store has ended"))


# after all else: Python aborts a process that ends while a thread of it is inside of torch
atexit.register(StoreThread.end_all)
