"""Notices a data worker that is stopped (SIGSTOP).

torch waits without a limit, whatever the DataLoader's timeout, for the memory of a batch that a
worker has sent and that is not yet taken: the worker itself hands it over.
"""

import multiprocessing

from lightning_shard.processes.failures.linux_processes import children, is_stopped

STOPPED_S = 30.0  # who stops a whole run for a while, as by Ctrl-Z, stops this process, too


class StoppedWorkers:
    """Looks at the children of this process, without collecting those that have ended."""

    def __init__(self, every_s: float) -> None:
        """Begin with none.

        Args:
            every_s: Seconds between two calls of `found`.
        """
        self._looks = STOPPED_S / every_s
        self._seen: dict[int, int] = {}  # looks at which a process was stopped, one after another

    def found(self) -> int | None:
        """Return the process number of a data worker that has been stopped for `STOPPED_S`."""
        stopped = filter(is_stopped, children())
        self._seen = {pid: self._seen.get(pid, 0) + 1 for pid in stopped}
        long = [pid for pid, looks in self._seen.items() if looks >= self._looks]
        if not long:
            return None
        workers = {child.pid for child in multiprocessing.active_children() if child.daemon}
        return next((pid for pid in long if pid in workers), None)
