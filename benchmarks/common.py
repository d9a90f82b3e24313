"""What the benchmarks share: ranks of their own, and the time, bytes and memory of a step."""

import contextlib
import csv
import ctypes
import gc
import os
import pickle
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from lightning_shard.processes.cpu_settings import keep_freed_memory, let_threads_run_on
from lightning_shard.trainer.profile.traffic import counted

Mesh = tuple[int, ...]  # data replicas, and the ranks along each split dim
Case = dict[str, Any]  # what a mesh, a network and links are, and what was measured of them
REPEATS = 3
MIB = 2**20
# options of a Trainer that prints and writes nothing
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


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


def start(ranks: int, function: Callable[..., Any], *args: Any, policy: bool = True) -> Any:
    """Call `function(*args)` on each of `ranks` new interpreters of a gloo group, one thread each.

    `launch` forks: pages of libraries, which a fork touches anew, would count as memory of a step.

    Args:
        ranks: The number of processes.
        function: A function of a module, so that it pickles.
        args: Its arguments.
        policy: Whether they have the settings that the strategy makes on CPUs.

    Returns:
        What rank 0 returned.
    """
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")  # a pipe that nobody reads yet holds 64 KiB only
        given = (ranks, port, answer, policy, function, args)
        start_processes(_serve, given, nprocs=ranks, start_method="spawn")
        return pickle.loads(answer.read_bytes())


def _serve(
    rank: int, ranks: int, port: int, answer: Path, policy: bool, function: Any, args: Any
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
        answer.write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def most(*values: float) -> list[float]:
    """Return for each value the largest of all ranks."""
    worst = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()


def in_turns(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median processor and wall-clock seconds of each way on this rank.

    Ways take turns, so that other work on the machine meets all of them.
    """
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            begin = time.process_time(), time.perf_counter()
            way()
            spent[name].append((time.process_time() - begin[0], time.perf_counter() - begin[1]))
    return {
        name: (statistics.median(cpu), statistics.median(wall))
        for name, (cpu, wall) in ((n, zip(*t, strict=True)) for n, t in spent.items())
    }


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
    wall_, cpu_, sent, peak = most(
        statistics.median(wall), statistics.median(cpu), traffic.bytes, peak
    )
    return Cost(wall_, cpu_, int(sent), int(peak))


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


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of results."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[dict[str, str]]) -> None:
    """Write a table of results, in the place of what was there."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
