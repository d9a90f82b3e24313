"""Ends a process whose starter has gone before the ranks have met.

Rank 0 of a script starts the others. If it ends before they have met, nobody watches them yet, and
they would wait for it for half an hour, and hold their devices.
"""

import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

# the process that starts the other ranks of a script; options of the command line begin otherwise
STARTED_BY = "_LIGHTNING_SHARD_STARTED_BY"
LOOK_S = 0.5


def begin_to_start() -> None:
    """Tell the processes that this one starts from now on who has started them."""
    os.environ[STARTED_BY] = str(os.getpid())


@contextmanager
def ends_with_starter() -> Generator[None]:
    """End this process, while open, as soon as the one that has started it is gone."""
    starter = int(os.environ.get(STARTED_BY, "0"))
    if starter in (0, os.getpid()):
        yield
        return
    was_parent, met = os.getppid() == starter, threading.Event()

    def watch() -> None:
        while not met.wait(LOOK_S):
            if (was_parent and os.getppid() != starter) or not _is_there(starter):
                print(
                    "This rank ends, because the process that has started it ended before the "
                    "ranks had met; look for the error of rank 0 above.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

    thread = threading.Thread(target=watch, daemon=True, name="starter-watch")
    thread.start()
    try:
        yield
    finally:
        met.set()
        thread.join()


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process has the number now
        return False
    return True
