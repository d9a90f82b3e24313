"""What measurements share: ranks on this machine, time, memory, and what they were measured on."""

import contextlib
import ctypes
import gc
import platform
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MIB = 2**20


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` on new gloo processes of one thread each; what rank 0 returns."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_start, (ranks, port, results, function, args), nprocs=ranks)
    return results.get()


def _start(
    rank: int, ranks: int, port: int, results: Any, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    result = function(*args)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()


def seconds(step: Callable[[], Any], repeats: int) -> float:
    """The shortest wall time of `step` over `repeats`, of the slowest rank."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    worst = torch.tensor(times)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.min().item()


def peak_bytes(step: Callable[[], Any]) -> int:
    """By how much the resident memory of this process grows at most during `step`."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def free_bytes() -> int:
    """Memory that this machine could still give to processes."""
    return _kib(Path("/proc/meminfo"), "MemAvailable")


def _status(name: str) -> int:
    return _kib(Path("/proc/self/status"), name)


def _kib(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def conditions(*packages: str) -> str:
    """The machine and the versions, in a line."""
    import importlib.metadata
    import os

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "CPU")
    versions = [f"{p} {importlib.metadata.version(p)}" for p in ("torch", *packages)]
    return ", ".join(
        [f"{os.cpu_count()} cores of {model}", f"Python {platform.python_version()}", *versions]
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
