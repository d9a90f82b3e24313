"""Each start of the ranks has names of its own in a store that outlives them.

torchrun's agent keeps its store when it starts the ranks again, and they must not find what the
ranks before them have left there. The number of the attempt does not tell the starts apart: each
agent counts its own, and none counts nodes that come or go. So rank 0 draws a name for the start,
and answers with it to a word that each other rank has just drawn.
"""

import contextlib
import threading
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_shard.processes.torch_private.internals import default_store

POLL_S = 0.05
_of_meetings: list[Any] = []  # the store of the process group, at most


@contextmanager
def meeting(store: Any, *, rank: int, world_size: int, timeout_s: float) -> Generator[Any]:
    """A view of `store` with the names of this start; rank 0 answers until the block ends.

    Args:
        store: That all ranks reach.
        rank: Of this process.
        world_size: Number of processes.
        timeout_s: Seconds to wait for rank 0.

    Raises:
        TimeoutError: Rank 0 does not answer.
    """
    word = uuid.uuid4().hex
    if rank:
        yield _view(store, _ask(store, rank, word, timeout_s, world_size))
        return
    done = threading.Event()
    thread = threading.Thread(target=_answer, args=(store.clone(), word, world_size, done))
    thread.start()
    try:
        yield _view(store, word)
    finally:
        done.set()
        thread.join()


def no_answer(rank: int, world_size: int, timeout_s: float) -> TimeoutError:
    """What another rank says that has waited for rank 0 in vain."""
    return TimeoutError(
        f"rank {rank} has waited {timeout_s:.0f} s for rank 0, which has failed, or was "
        f"not started with the same number of processes, {world_size}."
    )


def note_group() -> None:
    """The process group was just made with the store of a meeting."""
    _of_meetings[:] = [default_store()]


def is_of_one_start(store: Any) -> bool:
    """Whether `store`, of the process group, holds names of one start of the ranks only."""
    return any(store is known for known in _of_meetings)


def _view(store: Any, word: str) -> Any:
    # torch documents dist.PrefixStore
    return dist.PrefixStore(f"lightning_shard/start_{word}", store)  # pyright: ignore[reportPrivateImportUsage]


def _ask(store: Any, rank: int, word: str, timeout_s: float, world_size: int) -> str:
    store.set(f"lightning_shard/hello_{rank}", word)
    try:
        store.wait([f"lightning_shard/answer_{word}"], timedelta(seconds=timeout_s))
    except dist.DistNetworkError:
        raise
    except RuntimeError as err:
        raise no_answer(rank, world_size, timeout_s) from err
    return store.get(f"lightning_shard/answer_{word}").decode()


def _answer(store: Any, word: str, world_size: int, done: threading.Event) -> None:
    """Answer the last word of each rank; that of a rank of an earlier start is answered in vain."""
    answered: dict[int, bytes] = {}
    with contextlib.suppress(RuntimeError):  # the store has ended, which the rank itself sees
        while not done.wait(POLL_S):
            for rank in range(1, world_size):
                key = f"lightning_shard/hello_{rank}"
                if store.check([key]) and (theirs := store.get(key)) != answered.get(rank):
                    store.set(f"lightning_shard/answer_{theirs.decode()}", word)
                    answered[rank] = theirs
