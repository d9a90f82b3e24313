"""Settings of this process: Linux's scheduler, glibc's memory, and the log of torch's profiler.

The first two make ranks on CPUs faster. All hold for the whole process, so a variable of the
environment leaves it as it is.
"""

import ctypes
import os
import platform
import sys
from contextlib import suppress

# numbers of glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 32 * 2**20  # bytes: the most that glibc takes for M_MMAP_THRESHOLD
SMALLEST = 2**16  # bytes: a larger block has a mapping of its own, which ends as it is freed
SWITCH = "LIGHTNING_SHARD_CPU_SETTINGS"  # 0: this process is left as it is
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def tune_process(ranks: int) -> None:
    """Change this process, of `ranks` that compute on CPUs, unless `SWITCH` is 0.

    Raises:
        ValueError: `SWITCH` is neither 0 nor 1.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1", ""):
        raise ValueError(
            f"the variable {SWITCH} must be 0, which leaves the settings of this process as they "
            f"are, or 1; got {switch!r}."
        )
    if switch != "0":
        keep_freed_memory()
        if ranks > 1:
            let_threads_run_on()


def let_threads_run_on() -> None:
    """Ask Linux not to interrupt a thread that computes for one that wakes up.

    gloo's thread, woken by a message, would spin for a lock which the thread holds that it has just
    interrupted. Threads and processes that are made from here on inherit the policy, and priorities
    stay as they are. Where the policy was chosen by somebody, or may not be changed, it is left.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def quiet_profiler() -> None:
    """Let the profiler of torch report errors by exceptions only, and not in a log of its own.

    torch 2.15 writes two lines to stderr for each profile, and one of an error where no GPU is.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above all of its levels


def share_cores(processes: int) -> None:
    """Let this process, and those that it starts, compute with their part of the cores.

    More threads than cores wait for each other in every operation. A variable OMP_NUM_THREADS of
    the user counts instead.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        own = getattr(os, "sched_getaffinity", None)  # macOS lacks it
        cores = len(own(0)) if own else os.cpu_count() or 1
        threads = max(1, cores // processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def keep_freed_memory() -> None:
    """Ask glibc to keep what a step frees, for the next step, in blocks of up to 32 MiB.

    glibc would return it to Linux, which clears every page before it gives it out again. Larger
    blocks are still returned when they are freed. Where a variable of the environment sets one of
    glibc's limits (`man mallopt`), and with another C library, nothing is changed.
    """
    _set_glibc(LARGEST, -1)  # -1 is never


def return_freed_memory() -> None:
    """Ask glibc to return to Linux what is freed, where tensors wait in files.

    Else it keeps for the thread of each tile what this tile has freed. A variable of the
    environment that sets one of glibc's limits leaves it as it is.
    """
    if os.environ.get(SWITCH, "1") != "0":
        _set_glibc(SMALLEST, SMALLEST)


def _set_glibc(mapped: int, trimmed: int) -> None:
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if platform.libc_ver()[0] != "glibc" or tuned or any(map(os.environ.get, CHOSEN)):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, mapped)
    libc.mallopt(M_TRIM_THRESHOLD, trimmed)
