"""Lets ranks wait for each other before a collective that one of them may have begun alone.

A rank that waits in vain ends within seconds where the others are seen to have gone on: they are
at a collective that follows, or have begun another step. It ends within half a minute where all of
them wait, as for rows of this rank, and otherwise after `WAIT_S`.
"""

import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from lightning_shard.fsdp.same_blocks import LOOK_S, STUCK_LOOKS, has_come, orders
from lightning_shard.processes.failures.failure_watch import check_ranks
from lightning_shard.processes.failures.lone_waits import where_all_wait
from lightning_shard.processes.store import store_of_attempt

WAIT_S = 120.0  # for the other ranks, where nothing is seen of them
_waits: Counter[tuple[str, tuple[int, ...]]] = Counter()  # barriers of these ranks, by what for
PROCESS_STATE = {"_waits": _waits}


def wait_for_ranks(ranks: tuple[int, ...], what: str, does: str, advice: str) -> None:
    """Wait until each of the ranks comes to the next barrier of this kind.

    Args:
        ranks: The global ranks that must come.
        what: The kind of the barrier.
        does: The words for what a rank does, after "rank 0".
        advice: The words for what a user can change.

    Raises:
        RuntimeError: Some have gone on to something else, or did not come within `WAIT_S`, or half
            of the process group's timeout.
        RankFailedError: One of them has ended, or any rank has failed.
    """
    if len(ranks) < 2:
        return
    store, rank, number = store_of_attempt(), dist.get_rank(), _waits[what, ranks]
    _waits[what, ranks] += 1

    def place(rank: int, number: int) -> str:
        return f"{what}/{ranks[0]}-{len(ranks)}-{ranks[-1]}/{number}/{rank}"

    store.set(place(rank, number), "")
    with ExitStack() as shown:
        for order in orders():
            if set(order.ranks) <= set(ranks):  # else some of them do not meet here
                shown.enter_context(order.exchanges(does))
        absence = _absence(store, {r: place(r, number) for r in ranks}, does)
        if absence:
            raise RuntimeError(f"rank {rank} {does}, and {absence}: {advice}.")
    if number:
        store.delete_key(place(rank, number - 1))


def _absence(store: Any, places: dict[int, str], does: str) -> str:
    """Wait for the keys of the ranks; word which did not come, or "" once all have."""
    # sooner than a collective of the others gives up, which would not say what was wrong
    limit_s = min(WAIT_S, store.timeout.total_seconds() / 2)
    deadline = time.monotonic() + limit_s
    asked, stuck = [], 0
    while not has_come(store, [*places.values()], min(LOOK_S, deadline - time.monotonic())):
        missing = [r for r, key in places.items() if not store.check([key])]
        check_ranks(missing)
        asked = orders()
        others = next(filter(None, (order.gone_on(missing, does) for order in asked)), "")
        waits = where_all_wait(store, missing)
        stuck = stuck + 1 if waits else 0
        others = others or (waits if stuck > STUCK_LOOKS else "")
        missing = [r for r in missing if not store.check([places[r]])]
        if missing and others:
            return f"ranks {missing} did not, where {others}"
        if missing and time.monotonic() > deadline:
            return f"ranks {missing} did not within {limit_s:.3g} s"
    for order in asked:
        order.asks_no_more()
    return ""
