"""Refuses to exchange rows where ranks would not pair their messages.

A forked process, such as a worker of a DataLoader, has no threads of gloo, so it would wait for
ever. Two threads that work at once run in another order on each rank. So before a thread takes over
from another, the ranks compare which one it is.
"""

import os
import re
import sys
import threading
import time
import weakref
from collections import Counter
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.processes.failures.failure_watch import check_ranks, is_of_processes
from lightning_shard.processes.failures.lone_waits import REFUSED, where_ranks_wait
from lightning_shard.processes.store import store_of_attempt

# innermost functions of a thread that only waits, for others or for backward
_WAITING = {"_engine_run_backward", "_wait_for_tstate_lock", "_worker", "join", "select", "wait"}
_LONGEST_S = 0.05  # between two looks for the other ranks
_WAIT_S = 120.0  # for the other ranks
_BEGINS_S = 0.2  # a new thread may come here before the one that started it waits for it
_AT_ONCE = (
    "two threads use split tensors at once, or did so before, and each rank would run them in "
    "another order: let one thread wait for the other, and start the ranks again"
)

_thread: threading.Thread | None = None  # the one that exchanged last
_compared: threading.Thread | None = None  # the one that the ranks compared last; None for the main
_comparing: list[threading.Thread] = []  # the one that waits for the other ranks, at most
_comparisons: Counter[tuple[int, ...]] = Counter()  # by the ranks of the group
_seen = weakref.WeakSet[threading.Thread]()  # those that have exchanged
_refusals: list[str] = []  # after one, no rank knows what the others wait for
_of_parent: Any = None  # the process group of the process that this one was forked from
PROCESS_STATE = {
    "_thread": _thread, "_compared": _compared, "_comparing": _comparing,
    "_comparisons": _comparisons, "_seen": _seen, "_refusals": _refusals,
}  # fmt: skip


def check_thread(group: dist.ProcessGroup) -> None:
    """Refuse an exchange of a forked process, or of one of two threads that work at once.

    Raises:
        UnsupportedOperationError: Ranks would not pair their messages.
    """
    global _thread, _compared
    if _of_parent is not None and dist.group.WORLD is _of_parent:
        raise _refusal(
            "rows of a split tensor cannot be exchanged in a forked process, such as a worker of a "
            "DataLoader or of a pool: compute there with plain tensors, or with num_workers=0"
        )
    if _refusals:
        raise _refusal(_refusals[0])
    # not its number, which a thread takes over from one that has ended, and not on every rank
    last, thread = _thread, threading.current_thread()
    if thread is last and not _comparing:
        return
    with _Taking(thread):
        deadline = time.monotonic() + (0.0 if thread in _seen else _BEGINS_S)
        while _works(last):
            if time.monotonic() > deadline:
                _refuse_everywhere()
            time.sleep(0.005)
        _seen.add(thread)
        # Python calls those of autograd so; they belong to the one that waits for them
        is_of_torch = thread.name.startswith("Dummy-")
        if not is_of_torch and thread is not (_compared or threading.main_thread()):
            _compare(thread, group)
            _compared = thread
        _thread = thread


class _Taking:
    """Refuses a second thread while one takes over."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        _comparing.append(self._thread)  # one step of the interpreter
        if _comparing[0] is not self._thread:
            _comparing.remove(self._thread)
            _refuse_everywhere()

    def __exit__(self, *_: object) -> None:
        _comparing.remove(self._thread)


def _works(thread: threading.Thread | None) -> bool:
    """Say whether a thread, other than this one, does something else than to wait."""
    if thread is None or thread is threading.current_thread():
        return False
    if thread not in threading.enumerate():  # a new one may have its number
        return False
    # a thread does not tell whether it only waits (tests/domain/test_one_thread.py)
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
    return frame is not None and frame.f_code.co_name not in _WAITING


def _compare(thread: threading.Thread, group: dist.ProcessGroup) -> None:
    """Wait until all ranks of the group go on with this thread."""
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1 or not is_of_processes():
        return
    store, rank, number = store_of_attempt(), dist.get_rank(), _comparisons[ranks]
    _comparisons[ranks] += 1
    place = f"threads/{'-'.join(map(str, ranks))}"
    keys = {each: f"{place}/{number}/{each}" for each in ranks}
    store.set(keys[rank], _known_as(thread))
    pause_s, deadline = 0.001, time.monotonic() + _WAIT_S
    while not store.check([*keys.values()]):
        if store.check([REFUSED]):
            break
        missing = [each for each, key in keys.items() if not store.check([key])]
        check_ranks(missing)
        if missing and (where_ranks_wait(store, missing) or time.monotonic() > deadline):
            _refuse_everywhere(
                f"rank {rank} uses split tensors in the thread {thread.name!r}, and ranks "
                f"{missing} wait in another one or did not come within {_WAIT_S:.0f} s: all ranks "
                "of a domain must use them in that thread"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
    if store.check([REFUSED]):
        _refuse_everywhere(store.get(REFUSED).decode())
    if len({store.get(key) for key in keys.values()}) > 1:
        _refuse_everywhere()
    if number:
        store.delete_key(f"{place}/{number - 1}/{rank}")


def _known_as(thread: threading.Thread) -> str:
    """Name a thread alike on all ranks: numbers count other threads of a rank, too."""

    def kind(of: threading.Thread) -> str:
        return re.sub(r"\d+", "", of.name)

    alike = [each for each in threading.enumerate() if kind(each) == kind(thread)]
    return f"{kind(thread)} {alike.index(thread)}"


def _refuse_everywhere(words: str = _AT_ONCE) -> NoReturn:
    """Refuse here and from now on, and wherever a rank waits for another."""
    _refusals.append(words)
    if is_of_processes():
        store_of_attempt().set(REFUSED, _refusals[0])
    raise _refusal(_refusals[0])


def _refusal(words: str) -> UnsupportedOperationError:
    error = UnsupportedOperationError(words)
    error.is_named = True  # no rule would help
    return error


def _note_fork() -> None:
    global _of_parent
    _of_parent = dist.group.WORLD if dist.is_initialized() else None


os.register_at_fork(after_in_child=_note_fork)
