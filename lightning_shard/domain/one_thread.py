"""Refuses to exchange rows where ranks would not pair their messages.

A forked process, such as a worker of a DataLoader, has no threads of gloo, so it would wait for
ever. Two threads that work at once run in another order on each rank.
"""

import os
import sys
import threading
from typing import Any

import torch.distributed as dist

from lightning_shard.domain.errors import UnsupportedOperationError

# innermost functions of a thread that only waits, for others or for backward
_WAITING = {"_engine_run_backward", "_wait_for_tstate_lock", "_worker", "join", "select", "wait"}

_thread: threading.Thread | None = None  # the one that exchanged last
_of_parent: Any = None  # the process group of the process that this one was forked from
PROCESS_STATE = {"_thread": _thread}


def check_thread() -> None:
    """Refuse an exchange of a forked process, or of one of two threads that work at once.

    Raises:
        UnsupportedOperationError: Ranks would not pair their messages.
    """
    global _thread
    if _of_parent is not None and dist.group.WORLD is _of_parent:
        raise _refusal(
            "rows of a split tensor cannot be exchanged in a forked process, such as a worker of a "
            "DataLoader or of a pool: compute there with plain tensors, or with num_workers=0"
        )
    last = _thread
    if last is not None and last.ident == threading.get_ident():
        return
    frame = None
    if last is not None and last in threading.enumerate():  # a new one may have its number
        frame = sys._current_frames().get(last.ident or 0)  # pyright: ignore[reportPrivateUsage]
    if frame is not None and frame.f_code.co_name not in _WAITING:
        raise _refusal(
            "two threads use split tensors at once, and each rank would run them in another order: "
            "let one thread wait for the other"
        )
    _thread = threading.current_thread()


def _refusal(words: str) -> UnsupportedOperationError:
    error = UnsupportedOperationError(words)
    error.is_named = True  # no rule would help
    return error


def _note_fork() -> None:
    global _of_parent
    _of_parent = dist.group.WORLD if dist.is_initialized() else None


os.register_at_fork(after_in_child=_note_fork)
