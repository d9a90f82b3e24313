"""When one rank fails, all end: the first to fail says so in the store, the others watch for it.

A rank that waits in a collective for a dead peer may wait until a timeout of minutes (NCCL, XCCL),
or start a collective of its own while it handles its exception (a checkpoint on exception). Both
are settled here: after the first failure the others are given a short time, then end with its
reason.
"""

import itertools
import os
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

POLL_S = 0.5
GRACE_S = 10.0  # for a rank to end by itself, once another has failed
AGREE_S = 2.0  # for all ranks to report the same failure, as after Ctrl-C
_runs = itertools.count()  # the ranks begin their watches in the same order


class FailureWatch:
    """Watches the store of the default process group in a thread, until `close`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._run = f"lightning_shard/run_{next(_runs)}"
        self._stop = threading.Event()
        store = dist.distributed_c10d._get_default_store()  # no public way to the store
        self._store = store.clone()  # a connection of its own: the first may be busy waiting
        self._store.set_timeout(timedelta(seconds=5))
        self._thread = threading.Thread(target=self._watch, daemon=True, name="failure-watch")
        self._thread.start()

    def reported_alone(self, error: BaseException | None, world_size: int) -> bool:
        """Report that this rank fails; whether others do not, so that no collective may begin."""
        self.close()  # what is left to do on this rank is its own affair
        reason = f"rank {self.rank}: {type(error).__name__}: {error}"
        deadline = time.monotonic() + AGREE_S
        try:
            self._store.compare_set(f"{self._run}/reason", "", reason)
            self._store.add(f"{self._run}/failures", 1)
            while (failed := self._store.add(f"{self._run}/failures", 0)) < world_size:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        except (RuntimeError, ConnectionError):  # the rank that held the store is gone
            return True
        return failed < world_size

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                if not self._store.check([f"{self._run}/reason"]):
                    continue
                reason = self._store.get(f"{self._run}/reason").decode()
            except (RuntimeError, ConnectionError):
                return
            if self._stop.wait(GRACE_S):
                return
            sys.stderr.write(
                f"[rank {self.rank}] ended, because another rank failed first: {reason}\n"
            )
            sys.stderr.flush()
            os._exit(1)
