"""A thread that ends this process once its time is over, whatever its other threads wait for."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable


class Guard:
    """Looks after this process every `every_s`, from `start` to `close`.

    Attributes:
        code: The exit status of a process that the guard ends.
    """

    def __init__(
        self, rank: int, look: Callable[[], None], why: Callable[[], str], *, every_s: float
    ) -> None:
        """Describe what is looked after; `start` begins.

        Args:
            rank: The rank of this process, which its last line names.
            look: Called each time; it may call `end_within` or `end`.
            why: The reason that is printed when the time is over.
            every_s: Seconds between two looks.
        """
        self.code = 1
        self._rank, self._look, self._why, self._every_s = rank, look, why, every_s
        self._last_moment: float | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to look, once all is there that `look` reads."""
        threading.Thread(target=self._run, daemon=True, name="failure-guard").start()

    @property
    def counts_down(self) -> bool:
        """True if a last moment of this process is set."""
        return self._last_moment is not None

    def end_within(self, seconds: float | None) -> None:
        """End the process after so many seconds, unless it ends by itself; None: let it live."""
        self._last_moment = None if seconds is None else time.monotonic() + seconds

    def close(self) -> None:
        """Let the process live without a guard."""
        self._last_moment = None
        self._closed.set()

    def end(self, why: str) -> None:
        """End this process and its children now, without any of their own cleaning up."""
        self.say(why)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(self.code)

    def say(self, why: str) -> None:
        """Print the last line of this rank."""
        sys.stderr.write(f"[rank {self._rank}] ended, because {why}\n")
        sys.stderr.flush()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            self._look()
            last = self._last_moment
            if last is not None and time.monotonic() > last:
                self.end(self._why())
