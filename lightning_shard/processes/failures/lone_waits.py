"""Ends the ranks of a script that wait for each other at different places, with a sentence.

Where the loop is the user's, rank 0 alone may run a network on split tensors, as to draw a picture.
It waits for rows of the others, and they wait in a collective of the script. So a thread of each
rank looks where its main thread is, and tells the others once it does not come on.
"""

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from lightning_shard.processes.failures.failure_watch import is_of_processes
from lightning_shard.processes.failures.store_thread import StoreThread
from lightning_shard.processes.store import store_of_attempt
from lightning_shard.processes.torch_private.internals import default_store

LOOK_S = 2.0
STUCK_S = 15.0  # for all ranks, none of which computes

_OURS = f"{os.sep}lightning_shard{os.sep}"
_TORCH = f"{os.sep}torch{os.sep}"
_WAITS = ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py", "same_blocks.py")
_open: list["LoneWaits"] = []  # one, for the newest process group
PROCESS_STATE = {"_open": _open}


def watch_lone_waits() -> None:
    """Begin to look, once for a process group; each of its ranks makes a mesh."""
    if dist.get_world_size() == 1 or not is_of_processes():
        return
    if _open and _open[0].group_store is default_store():
        return
    for old in _open:
        old.close()
    _open[:] = [LoneWaits()]


class LoneWaits:
    """Looks where the thread is that made it.

    Attributes:
        group_store: The store of the process group.
    """

    def __init__(self) -> None:
        """Begin a thread that talks to the store."""
        self.group_store = default_store()
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._store, self._looked_at = store_of_attempt().clone(), threading.get_ident()
        self._seen: tuple[object, ...] = ()
        self._since, self._told = time.monotonic(), False
        self._thread = StoreThread(self._look, every_s=LOOK_S)
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread."""
        atexit.unregister(self.close)
        self._thread.close()
        self._thread.join()

    def _look(self) -> None:
        # nobody else knows of a thread in a collective (tests/processes/test_lone_waits.py)
        frame = sys._current_frames().get(self._looked_at)  # pyright: ignore[reportPrivateUsage]
        waits = frame is not None and Path(frame.f_code.co_filename).name in _WAITS
        seen = (id(frame), frame.f_lasti) if frame is not None and waits else ()
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
            if self._told:
                self._store.delete_key(f"lone_waits/{self._rank}")
                self._told = False
        elif frame is not None and waits and time.monotonic() - self._since > STUCK_S:
            if not self._told:
                self._store.set(f"lone_waits/{self._rank}", json.dumps(_place(frame)))
                self._told = True
            self._compare()

    def _compare(self) -> None:
        keys = [f"lone_waits/{rank}" for rank in range(self._ranks)]
        if not self._store.check(keys):
            return
        places = [json.loads(self._store.get(key)) for key in keys]
        other = next((r for r, (is_split, _) in enumerate(places) if not is_split), None)
        if other is None or not places[self._rank][0]:
            return
        sys.stderr.write(
            f"[rank {self._rank}] ended, because it waits at {places[self._rank][1]} for rows or "
            f"parameters of rank {other}, which waits at {places[other][1]}: a split tensor and a "
            "sharded module must be used on all ranks of a domain; draw or save the result on one "
            "of them.\n"
        )
        sys.stderr.flush()
        os._exit(1)


def _place(frame: FrameType) -> tuple[bool, str]:
    """Return whether this package waits there, and the line of the script."""
    is_split, at = False, frame
    while at is not None:
        file = at.f_code.co_filename
        is_split = is_split or _OURS in file
        if _OURS not in file and _TORCH not in file:
            return is_split, f"{file}:{at.f_lineno}"
        at = at.f_back
    return is_split, f"{frame.f_code.co_filename}:{frame.f_lineno}"
