"""When one rank fails, all end: the first to fail says so in the store, the others watch for it.

A rank that waits in a collective for a dead peer may wait until a timeout of minutes (NCCL, XCCL), or
start a collective of its own while it handles its exception (a checkpoint on exception). Both are
settled here: after the first failure the others are given a short time, then end with its reason.
"""

import os
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

POLL_S = 0.5
GRACE_S = 10.0  # for a rank to end by itself, once another has failed
KEY = "lightning_shard/failed"
COUNT = "lightning_shard/failures"


class FailureWatch:
    """Watches the store of the default process group in a thread, until `close`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._stop = threading.Event()
        store = dist.distributed_c10d._get_default_store()  # no public way to the store
        self._store = store.clone()  # a connection of its own: the first may be busy waiting
        self._store.set_timeout(timedelta(seconds=5))
        self._thread = threading.Thread(target=self._watch, daemon=True, name="failure-watch")
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails; the first report counts."""
        reason = f"rank {self.rank}: {type(error).__name__}: {error}".encode()
        try:
            self._store.add(COUNT, 1)
            self._store.compare_set(KEY, "", reason)
        except (RuntimeError, ConnectionError):
            self._stop.set()  # the store died with the rank that held it: the others notice by themselves

    def alone(self, world_size: int) -> bool:
        """Whether only some ranks have failed, so that no collective can be started any more."""
        deadline = time.monotonic() + 2.0
        try:
            while (failed := self._store.add(COUNT, 0)) < world_size and time.monotonic() < deadline:
                time.sleep(0.05)
        except (RuntimeError, ConnectionError):
            return True
        return failed < world_size

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                if not self._store.check([KEY]):
                    continue
                reason = self._store.get(KEY).decode()
            except (RuntimeError, ConnectionError):
                return
            if self._stop.wait(GRACE_S):
                return
            sys.stderr.write(
                f"[rank {self.rank}] ended, because another rank failed first: {reason}\n"
            )
            sys.stderr.flush()
            os._exit(1)
