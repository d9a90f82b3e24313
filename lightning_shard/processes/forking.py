"""Forks an interpreter that has computed, and cares for what such a fork may not do."""

import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.processes.device import accelerators
from lightning_shard.processes.process_info import NOTEBOOK, process_info
from lightning_shard.processes.torch_private.internals import open_groups
from lightning_shard.processes.variables import joined

_OURS = __name__.partition(".")[0] + "."
_OF_PARENT: dict[Any, Any] = {}  # kept, because their destructors wait for threads


def initialised_accelerator() -> str | None:
    """Name the accelerator that this process has begun to use: it would not work in a fork."""
    begun = (row.type.upper() for row in accelerators() if row.module.is_initialized())
    return next(begun, None)


def what_no_fork_has() -> str | None:
    """Say what has begun in this process that would not work in a fork of it; None: nothing.

    torch counts devices as the first backward pass of a process begins, and starts a thread for
    each. On fake tensors, as where it compiles, it finds some on any machine. No fork can
    differentiate then.
    """
    if device := initialised_accelerator():
        return f"{device} has been initialised"
    names = (_name_of(task) for task in Path("/proc/self/task").glob("*"))
    if any(name.startswith(b"pt_autograd") for name in names):
        return "torch has started threads for backward passes"
    return None


def _name_of(task: Path) -> bytes:
    """Return the name of a thread, which Linux cuts after 15 bytes, also within a letter."""
    try:
        return (task / "comm").read_bytes()
    except OSError:  # the thread has ended
        return b""


def belongs_to_a_group() -> bool:
    """Say whether this process is one of several that another process started."""
    _, ranks = joined() or (0, 1)
    return max(process_info().world_size, ranks) > 1


@dataclass(frozen=True)
class Forks:
    """The parent's part of a fork, for `begin_forked_rank`."""

    all_forked: Barrier
    collects: bool  # whether garbage is collected in the parent by itself


@contextmanager
def forking(ranks: int) -> Generator[Forks]:
    """Fork ranks, while open, without Python 3.12's warning of threads.

    The threads are those of torch and of a notebook's kernel; a rank uses none of them. No garbage
    is collected meanwhile: the parent's may hold a store, whose end joins a thread that a rank does
    not have. Such a rank died of SIGSEGV.

    Yields:
        What `begin_forked_rank` takes, with a barrier. A rank that connected before the next one is
        forked would set the thread of the store to work, which looks up the name of who connects
        under a lock of the C library. A fork at that moment has the lock closed, for ever.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            yield Forks(multiprocessing.get_context("fork").Barrier(ranks), collects)
    finally:
        if collects:
            gc.enable()


@contextmanager
def store_of_ranks() -> Generator[int]:
    """Hold the store in which ranks of this machine meet; its port."""
    # torch documents dist.TCPStore
    TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] # noqa: N806
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        del store  # not with a traceback, later, in a fork that would wait for the store's thread


def become_rank(rank: int, processes: int, port: int) -> None:
    """Set the variables of torchrun, whose process groups too meet in a store of the parent."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(processes), "GROUP_RANK": "0",
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": NOTEBOOK, "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def emptied(cache: Any) -> Any:
    """Return a cache of the same function that holds nothing yet."""
    return lru_cache(**cache.cache_parameters())(cache.__wrapped__)


def _begin_caches_anew() -> None:
    """Keep what is the parent's, and begin with empty caches.

    `PROCESS_STATE` of a module names what belongs to a process.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith(_OURS)]
    for module in modules:
        for name in vars(module).get("PROCESS_STATE", ()):
            value = _OF_PARENT[module, name] = getattr(module, name)
            if hasattr(value, "cache_parameters"):
                setattr(module, name, emptied(value))


def begin_forked_rank(forks: Forks) -> None:
    """Call first in a forked process; it returns once all ranks are forked.

    It computes with one thread: libgomp waits forever for the threads that the parent computed
    with. Signals are its own: the parent's event loop reads of them in a socket that both have. A
    process group of the parent alone is forgotten, for what ends it waits for the parent's threads.
    What the parent has left for the collector is left there, since groups may be among it, and so
    are the meshes that it has made.
    """
    gc.freeze()
    if forks.collects:
        gc.enable()
    _begin_caches_anew()
    if dist.is_initialized():
        _OF_PARENT.update(open_groups())
        dist.destroy_process_group()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # Lightning sets the number of threads where this is not
    forks.all_forked.wait()
