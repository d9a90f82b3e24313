"""What the benchmarks share: ranks of their own, and the time, bytes and memory of a step."""

import contextlib
import ctypes
import gc
import os
import pickle
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from lightning_shard.processes.cpu_settings import keep_freed_memory, let_threads_run_on
from lightning_shard.trainer.profile.traffic import counted

REPEATS = 3
ANSWER = "answer"  # a file that rank 0 writes: a pipe that nobody reads yet holds 64 KiB only
MIB = 2**20


@dataclass(frozen=True)
class Cost:
    """Of one step on the rank that needs most.

    Attributes:
        wall: Seconds of wall-clock time, all ranks together.
        cpu: Seconds of processor time, which other work on the machine does not lengthen.
        sent: Bytes sent to other ranks.
        peak: Bytes of memory above those in use before.
    """

    wall: float
    cpu: float
    sent: int
    peak: int


def start(
    ranks: int, function: Callable[..., Any], *args: Any, policy: bool = True, fork: bool = False
) -> Any:
    """Call `function(*args)` on each of `ranks` new processes of a gloo group.

    Each runs on one thread.

    Args:
        ranks: The number of processes.
        function: A function of a module, so that it pickles.
        args: Its arguments.
        policy: Whether their threads have the policy that the strategy sets on CPUs.
        fork: Whether they begin with what this process has imported, which saves the time. It must
            not have computed anything.

    Returns:
        What rank 0 returned.
    """
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        method = "fork" if fork else "spawn"
        given = (ranks, port, folder, function, args, policy)
        start_processes(_serve, given, nprocs=ranks, start_method=method)
        return pickle.loads(Path(folder, ANSWER).read_bytes())


def _serve(
    rank: int,
    ranks: int,
    port: int,
    folder: str,
    function: Callable[..., Any],
    args: Any,
    policy: bool,
) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= address | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    if policy:
        let_threads_run_on()  # as the strategy does on CPUs
        keep_freed_memory()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    result = function(*args)
    if rank == 0:
        Path(folder, ANSWER).write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def measured(step: Callable[[], Any], warm_up: Callable[[], Any]) -> Cost:
    """The cost of `step`, the median of several for time; every rank of the group calls it.

    Args:
        step: What is measured. Its first call gives bytes and memory.
        warm_up: The same on little data: what libraries allocate once is not counted.
    """
    warm_up()
    map_blocks_from(MIB)  # holes between kept blocks would count as memory in use
    before = reset_peak()
    with counted() as traffic:
        step()
    peak = memory("VmHWM") - before
    map_blocks_from(32 * MIB)  # what glibc comes to by itself
    wall, cpu = [], []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter(), time.process_time()
        step()
        cpu.append(time.process_time() - begin[1])
        dist.barrier()
        wall.append(time.perf_counter() - begin[0])
    times = statistics.median(wall), statistics.median(cpu)
    worst = torch.tensor([*times, traffic.bytes, peak], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Cost(float(worst[0]), float(worst[1]), int(worst[2]), int(worst[3]))


def map_blocks_from(size: int) -> None:
    """Let glibc give blocks of at least `size` bytes back when they are freed."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_threshold, size)
    libc.mallopt(m_trim_threshold, 2 * size)


def reset_peak() -> int:
    """Make Linux forget the process's peak of memory; returns what is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps for later would hide new memory
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    """Read how many bytes this process uses ("VmRSS"), or has used at most ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def describe() -> None:
    """Print the machine and the versions."""
    print(machine())


def machine() -> str:
    """Name the machine and the versions."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    processor = names[0] if names else platform.machine()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{len(names)} x {processor}, one thread per rank, gloo; {versions}"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print `rows` as a Markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
