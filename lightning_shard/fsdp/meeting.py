"""Lets ranks meet before a collective that one of them may have begun alone."""

from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from lightning_shard.processes.store import store_of_attempt

WAIT_S = 120.0  # for the other ranks
_met: Counter[tuple[str, tuple[int, ...]]] = Counter()  # meetings of these ranks, by what for
PROCESS_STATE = {"_met": _met}


def meet(ranks: tuple[int, ...], what: str, does: str, advice: str) -> None:
    """Wait until each of the ranks comes to the next meeting of this kind.

    Args:
        ranks: The global ranks that must come.
        what: The kind of the meeting.
        does: The words for what a rank does, after "rank 0".
        advice: The words for what a user can change.

    Raises:
        RuntimeError: Some did not come within `WAIT_S`, or half of the process group's timeout.
    """
    if len(ranks) < 2:
        return
    store, rank, number = store_of_attempt(), dist.get_rank(), _met[what, ranks]
    # sooner than a collective of the others gives up, which would not say what was wrong
    wait = min(timedelta(seconds=WAIT_S), store.timeout / 2)
    _met[what, ranks] += 1

    def place(rank: int, number: int) -> str:
        return f"{what}/{ranks[0]}-{len(ranks)}-{ranks[-1]}/{number}/{rank}"

    store.set(place(rank, number), "")
    try:
        store.wait([place(r, number) for r in ranks], wait)
    except dist.DistStoreError as error:
        missing = [r for r in ranks if not store.check([place(r, number)])]
        raise RuntimeError(
            f"rank {rank} {does}, and ranks {missing} did not within {wait.total_seconds():.3g} s: "
            f"{advice}."
        ) from error
    if number:
        store.delete_key(place(rank, number - 1))
