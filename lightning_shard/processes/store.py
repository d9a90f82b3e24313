"""The store in which the ranks of a run meet before they have a process group.

Each start of the ranks has names of its own in a store that outlives them. torchrun's agent keeps
its store when it starts the ranks again, and they must not find what the ranks before them have
left there. The number of the attempt does not tell the starts apart: each agent counts its own, and
none counts nodes that come or go. So rank 0 draws a name for the start, and answers with it to a
word that each other rank has just drawn.
"""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_shard.processes.torch_private.internals import default_store
from lightning_shard.processes.variables import launcher_holds_store

POLL_S = 0.05
_of_meetings: list[Any] = []  # the store of the process group, at most


def connect(rank: int, world_size: int, address: str, timeout_s: float) -> Any:
    """Connect to the store at `address`; rank 0 opens it, unless the launcher has.

    Args:
        rank: The rank of this process.
        world_size: Number of processes; one alone gets a store in its own memory.
        address: "host:port" of rank 0.
        timeout_s: Seconds to wait for rank 0, and for each answer of the store.

    Raises:
        RuntimeError: The port is taken, or rank 0 is not reached.
    """
    if world_size == 1:  # nobody to meet, and no port that another program could have taken
        # torch documents dist.HashStore
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    host, _, port = address.rpartition(":")
    # torch documents dist.TCPStore
    TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] # noqa: N806
    opens = rank == 0 and not _is_of_launcher(host, port)
    timeout = timedelta(seconds=timeout_s)
    try:
        if not opens:
            _wait_for_port(host, int(port), timeout_s)
        # `agree` waits for the others, and says which of them do not come
        return TCPStore(
            host, int(port), None, opens, timeout, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, OSError) as err:
        if "EADDRINUSE" in str(err):
            raise RuntimeError(
                f"port {address} is taken on this machine; set MASTER_PORT to another, equal on "
                "all ranks."
            ) from err
        raise RuntimeError(
            f"rank {rank} did not reach rank 0 at {address} ({err}); MASTER_ADDR and MASTER_PORT "
            "must be those of rank 0, and its port open to the other nodes."
        ) from err


def names_of_this_start(
    store: Any, rank: int, world_size: int, address: str, timeout_s: float
) -> AbstractContextManager[Any]:
    """Open a view of the store in which nothing of an earlier start is found.

    A store that rank 0 has opened for this start is returned as it is.
    """
    host, _, port = address.rpartition(":")
    if world_size == 1 or not _is_of_launcher(host, port):
        return nullcontext(store)
    return meeting(store, rank=rank, world_size=world_size, timeout_s=timeout_s)


@contextmanager
def meeting(store: Any, *, rank: int, world_size: int, timeout_s: float) -> Generator[Any]:
    """Open a view of `store` with the names of this start; rank 0 answers until the block ends.

    Args:
        store: A torch.distributed store that all ranks reach.
        rank: The rank of this process.
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
    """Make the error of a rank that has waited for rank 0 in vain."""
    return TimeoutError(
        f"rank {rank} has waited {timeout_s:.0f} s for rank 0, which has failed, or was "
        f"not started with the same number of processes, {world_size}."
    )


def note_group() -> None:
    """Remember that the process group was just made with the store of a meeting."""
    _of_meetings[:] = [default_store()]


def store_of_attempt() -> Any:
    """Return the store of the process group, with names of this attempt of an elastic launcher.

    torchrun's agent keeps its store when it starts the processes again. A group that was not made
    by this package may have in it what the processes before have left there.
    """
    store = default_store()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    of_one_start = any(store is known for known in _of_meetings)
    name = "lightning_shard" if of_one_start else f"lightning_shard/attempt_{attempt}"
    # torch documents dist.PrefixStore
    return dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]


def _is_of_launcher(host: str, port: str) -> bool:
    """Return whether torchrun's agent, or `launch`, holds the store at this address."""
    at = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    return launcher_holds_store() and at == (host, port)


def _wait_for_port(host: str, port: int, timeout_s: float) -> None:
    """Wait until rank 0 listens; torch's store would try for three times as long."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            socket.create_connection((host, port), timeout=left).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _view(store: Any, word: str) -> Any:
    # torch documents dist.PrefixStore
    return dist.PrefixStore(f"lightning_shard/start_{word}", store)  # pyright: ignore[reportPrivateImportUsage]


def _ask(store: Any, rank: int, word: str, timeout_s: float, world_size: int) -> str:
    """Write `word` for rank 0, and return the name of this start, with which rank 0 answers it."""
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
