"""Ends the ranks of a script that wait for others in vain, with a sentence.

Where the loop is the user's, rank 0 alone may run a network on split tensors, as to draw a picture.
It waits for rows of the others, and they wait in a collective of the script. Or a loss is detached
on rank 0 alone, which goes on to the next step. So a thread of each rank looks where its main
thread is, and tells the others once it does not come on.

A rank that refuses threads exchanges no more rows. Others may wait for them, in any thread.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from lightning_shard.processes.failures.call_order import CallOrder, Latest
from lightning_shard.processes.failures.failure_watch import is_of_processes, tell_end
from lightning_shard.processes.failures.linux_processes import ended_among
from lightning_shard.processes.failures.notice import Notice, told_by_all
from lightning_shard.processes.failures.store_thread import StoreThread
from lightning_shard.processes.store import store_of_attempt
from lightning_shard.processes.torch_private.internals import default_store

LOOK_S = 2.0
STUCK_S = 15.0  # for all ranks, none of which computes
APART_S = 60.0  # where all wait for rows, which may be a slow transfer that some have ended
IN_TRAINER_S = 300.0  # the same in a Trainer, whose own comparisons are quicker
REFUSED_S = 5.0  # for a rank that waits for one that exchanges no more rows
ENDED_S = 10.0  # since all others have ended, which may yet be heard to have failed
ORDER_S = 4.0  # for ranks that have called different functions, and will never come together
ENDED = "have come to the end of their programs, or were killed; let all ranks call this"
REFUSED = "threads/refused"  # in the store: why no rank exchanges rows any more

_OURS = f"{os.sep}lightning_shard{os.sep}"
_RULES = f"{_OURS}ops{os.sep}"  # with a folder for each family
_CALLS = [f"{_OURS}{room}{os.sep}" for room in ("ops", "domain", "tensor")]
_BACKWARD = "whole_gradients.py"  # passes a call to autograd on
_TORCH = f"{os.sep}torch{os.sep}"
_BARRIER = "rank_barrier.py"
_WAITS = (
    "distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py", "same_blocks.py",
    "wire.py", "_fsdp_collectives.py", "_fsdp_param_group.py",
)  # fmt: skip
_open: list["LoneWaits"] = []  # one, for the newest process group
PROCESS_STATE = {"_open": _open}


def watch_lone_waits(*, in_trainer: bool = False) -> None:
    """Begin to look, once for a process group; each of its ranks makes a mesh.

    Args:
        in_trainer: True leaves it to others to end ranks that wait in vain, for some minutes.
    """
    if dist.get_world_size() == 1 or not is_of_processes():
        return
    if _open and _open[0].group_store is default_store():
        return
    for old in _open:
        old.close()
    _open[:] = [LoneWaits(in_trainer=in_trainer)]


def compare_order(ranks: Sequence[int], latest: Latest) -> None:
    """Compare, while ranks wait for each other, the order in which they have called functions.

    Args:
        ranks: The ranks that call the same functions in the same order.
        latest: Returns what this rank has called.
    """
    for waits in _open:
        waits.order = CallOrder(dist.get_rank(), ranks, latest)


def where_all_wait(store: Any, absent: Sequence[int]) -> str:
    """Word where the first of the absent ranks waits; "" where any rank but this one computes."""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    if not absent or not (places := where_ranks_wait(store, others)):
        return ""
    _, place, _ = places[others.index(absent[0])]
    return f"rank {absent[0]} waits at {place} for what does not come"


def where_ranks_wait(store: Any, ranks: Sequence[int]) -> list[tuple[bool, str, bool]]:
    """Return where all of these ranks have waited for `STUCK_S`; nothing where one has not."""
    return told_by_all(store, [*map(_key, ranks)])


class LoneWaits:
    """Looks where the thread is that made it.

    Attributes:
        group_store: The store of the process group.
        order: The calls that ranks compare; None where nobody counts them.
    """

    def __init__(self, *, in_trainer: bool) -> None:
        """Begin a thread that talks to the store, and ends this process."""
        self._in_trainer = in_trainer
        self.group_store = default_store()
        self.order: CallOrder | None = None
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._store, self._looked_at = store_of_attempt().clone(), threading.get_ident()
        # when a thread was first seen in a call that waits: by its number, frame and instruction
        self._since: dict[tuple[int, int, int], float] = {}
        self._notice = Notice(_key(self._rank))
        self._alone_since = time.monotonic()
        self._thread = StoreThread(self._look, every_s=LOOK_S)
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread."""
        atexit.unregister(self.close)
        self._thread.close()
        self._thread.join()

    def _look(self) -> None:
        waits, now = _places(), time.monotonic()
        self._since = {key: self._since.get(key, now) for key in waits}
        longest = now - min(self._since.values(), default=now)
        if not self._in_trainer and longest > REFUSED_S and self._store.check([REFUSED]):
            _end(self._rank, self._store.get(REFUSED).decode())
        own = next((key for key in waits if key[0] == self._looked_at), None)
        waited = 0.0 if own is None else now - self._since[own]
        if self.order is not None:
            if own is None or waited <= ORDER_S:
                self.order.forget(self._store)
            elif other := self.order.difference(self._store, waits[own][2]):
                _end(self._rank, other)
        if own is None or waited <= STUCK_S:
            self._notice.take_back(self._store)
            self._alone_since = now
            return
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        if ended_among(self._store, others) != others:
            self._alone_since = now
        elif now - self._alone_since > ENDED_S:
            _end(self._rank, f"it waits at {waits[own][1]}, and all other ranks {ENDED}")
        apart_s = IN_TRAINER_S if self._in_trainer else APART_S
        self._notice.tell(self._store, [*waits[own][:2], waited > apart_s])
        self._compare()

    def _compare(self) -> None:
        if not (places := where_ranks_wait(self._store, range(self._ranks))):
            return
        if self.order is not None and self.order.ahead:
            _end(self._rank, self.order.ahead)
        waits, here, _ = places[self._rank]
        lone = [r for r, (is_split, *_) in enumerate(places) if not (is_split or self._in_trainer)]
        apart = [r for r, (_, place, _) in enumerate(places) if place != here]
        if not waits or not (lone or (apart and all(is_long for *_, is_long in places))):
            return
        other = (lone or apart)[0]
        advice = (
            "draw or save the result on one of them"
            if lone
            else "let all come to the same lines, with losses that reach parameters on all"
        )
        _end(
            self._rank,
            f"it waits at {here} for rows or parameters of rank {other}, which waits at "
            f"{places[other][1]}: a split tensor and a sharded module must be used on all ranks of "
            f"a domain; {advice}.",
        )


def _key(rank: int) -> str:
    return f"lone_waits/{rank}"


def _places() -> dict[tuple[int, int, int], tuple[bool, str, str]]:
    """Return for each thread that waits where it does, see `_place`.

    A frame that is held keeps the tensors of its function after that has returned, so that their
    memory is not freed: none is held any more as this returns.
    """
    # nobody else knows of a thread in a collective (tests/processes/test_lone_waits.py)
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    return {(thread, *_call(f)): _place(f) for thread, f in frames.items() if _waits(f)}


def _waits(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).name in _WAITS


def _call(frame: FrameType) -> tuple[int, int]:
    """Return the frame and the instruction that called what waits, as often as that may look."""
    at = frame
    while at.f_back is not None and _waits(at):
        at = at.f_back
    return id(at), at.f_lasti


def _end(rank: int, why: str) -> None:
    sys.stderr.write(f"[rank {rank}] ended, because {why}\n")
    sys.stderr.flush()
    tell_end(why)
    os._exit(1)


def _place(frame: FrameType) -> tuple[bool, str, str]:
    """Return whether this package waits there, the line of the script, and what waits.

    What waits is a "call", a "barrier" that will say by itself which rank is missing, or "". One
    line may call many operations, so the family of the one that waits is named, too.
    """
    is_split, at, inside, waits = False, frame, "", ""
    while at is not None:
        file = at.f_code.co_filename
        if _RULES in file.rpartition(os.sep)[0] and not file.endswith(_BACKWARD):
            inside = f" (in {Path(file).stem})"
        is_split = is_split or _OURS in file
        if not waits and file.endswith(_BARRIER):
            waits = "barrier"
        elif not waits and any(room in file for room in _CALLS):
            waits = "call"
        if _OURS not in file and _TORCH not in file:
            return is_split, f"{file}:{at.f_lineno}{inside}", waits
        at = at.f_back
    return is_split, f"{frame.f_code.co_filename}:{frame.f_lineno}", waits
