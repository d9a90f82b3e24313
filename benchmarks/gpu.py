"""Measures a GPU in one command, in less than eight minutes, without a network.

    python -m benchmarks.gpu --out outputs/gpu
    python -m benchmarks.gpu --only exactness --only parameters

Each part runs in processes of its own, within a limit of its own, and what tells most comes first:
exactness of split fields beside float64 on the CPU, on ranks that share the GPU over gloo; the
spectral convolution beside neuraloperator's, by each method; kernels and host time of a step; the
strategy on one device beside plain Lightning; steps captured as CUDA graphs; activations on the
host; budgets; whole and sharded parameters; the device's own collectives; tiles; a compiled
network; the tests marked gpu. Writes gpu.json and gpu.md after each part. A machine without a GPU
says so and runs the same parts on the CPU, on small fields.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes

from benchmarks import gpu_parts, gpu_speed
from benchmarks.gpu_speed import Rows

LIMIT_S = 480.0  # of the whole command
TESTS_S = 120.0
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """A function of `gpu_parts`, run in processes of its own.

    Attributes:
        ranks: The number of processes; 0 is one without a process group.
        backend: The backend of their collectives.
        function: Gives the rows, one after the other.
        args: Its arguments.
        limit_s: Seconds after which it is ended.
    """

    ranks: int
    backend: str
    function: Callable[..., Iterable[dict[str, Any]]]
    args: tuple[Any, ...]
    limit_s: float = 60.0


def parts(small: bool) -> dict[str, Part]:
    """The parts by name; what tells most comes first."""
    resolution, kind = (64 if small else 256), gpu_speed.device().type
    large = resolution if small else 2048
    names = ["U-Net", "ViT", "TFNO"]
    fields, modes = ([(64, 64)], 16) if small else (gpu_speed.SPECTRAL_FIELDS, 32)
    own = dist.get_default_backend_for_device(kind)
    devices = 1 if small else torch.accelerator.device_count()
    return {
        "exactness, 2 ranks on one device": Part(
            2, "gloo", gpu_parts.exactness, (names, resolution), 90
        ),
        "spectral convolution": Part(1, own, gpu_speed.spectral, (fields, modes), 75),
        "launches": Part(1, own, gpu_speed.launches, (names, resolution), 40),
        "strategy on one device": Part(
            0, "", gpu_parts.one_device, (resolution, 5 if small else 40), 50
        ),
        "captured": Part(1, own, gpu_speed.captured, (resolution if small else 512,), 60),
        "activations on the host": Part(1, own, gpu_parts.offloaded, (large,), 40),
        "activations on the host, float64": Part(
            1, own, gpu_parts.offloaded, (resolution, torch.float64), 40
        ),
        "budgets of memory": Part(1, own, gpu_parts.paged, (large,), 50),
        "budgets of memory, float64": Part(
            1, own, gpu_parts.paged, (resolution, torch.float64), 40
        ),
        "parameters, 2 ranks on one device": Part(
            2, "gloo", gpu_parts.parameters, (names[:2], resolution), 90
        ),
        f"{own}, {devices} ranks": Part(devices, own, gpu_parts.collective, (resolution,), 60),
        "tiles, float64": Part(0, "", gpu_parts.tiled, (resolution, 1, torch.float64), 60),
        "tiles": Part(0, "", gpu_parts.tiled, (large,), 90),
        "compiled": Part(0, "", gpu_speed.compiled, (resolution if small else 512,), 90),
        "exactness, 4 ranks on one device": Part(
            4, "gloo", gpu_parts.exactness, (names, resolution), 90
        ),
    }


def run_tests(limit_s: float) -> Rows:
    """Run the tests marked gpu of the files that have such; what pytest says last."""
    files = [str(f) for f in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in f.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return [{"failed": f"no end after {limit_s:.0f} s"}]
    said = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    return [{"pytest -m gpu": said, "status": done.returncode}]


def run_part(part: Part, limit_s: float) -> Rows:
    """The rows of a part, run in processes of its own; one that fails or hangs says so in a row.

    It keeps the rows that it had before.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # a server that has imported all, and has not asked for the device, forks the processes
    mp.set_forkserver_preload([gpu_parts.__name__])
    results = mp.get_context("forkserver").SimpleQueue()
    ranks, found = max(part.ranks, 1), Rows()
    given = (ranks, port, part.backend, results, part.function, part.args)
    started: Any = start_processes(
        _serve, given, nprocs=ranks, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + limit_s
    try:
        while not started.join(timeout=0.1):
            _take(results, found)
            if time.monotonic() > deadline:
                found.append({"failed": f"no end after {limit_s:.0f} s"})
                break
        _take(results, found)
    except Exception as error:  # of any kind: it becomes the last row of this part
        _take(results, found)
        found.append({"failed": str(error).strip().splitlines()[-1]})
    finally:
        for process in started.processes:
            process.kill()
    return found


def _take(results: Any, found: Rows) -> None:
    while not results.empty():
        found.append(results.get())


def _serve(
    rank: int, ranks: int, port: int, backend: str, results: Any, function: Any, args: Any
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # ranks that share a device have the same local rank, by which torch's meshes choose theirs
    local = rank % max(torch.accelerator.device_count(), 1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(local)}
    if gpu_speed.device().type == "cpu":
        torch.set_num_threads(1)
    if backend:
        if backend not in ("gloo", "mpi"):
            torch.accelerator.set_device_index(local)
        dist.init_process_group(backend)
    else:  # a Trainer starts its own
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    for row in function(*args):
        if rank == 0:
            results.put(row)
    if dist.is_initialized():
        dist.destroy_process_group()


def facts() -> dict[str, str]:
    """The machine and the versions."""
    kind = gpu_speed.device().type
    name = "no GPU: the CPU, small fields" if kind == "cpu" else _name(kind)
    devices = str(0 if kind == "cpu" else torch.accelerator.device_count())
    return {
        "device": name, "devices": devices, "torch": torch.__version__,
        "CUDA": str(torch.version.cuda), "Python": platform.python_version(),
    }  # fmt: skip


def _name(kind: str) -> str:
    return torch.get_device_module(kind).get_device_name(0)


def markdown(about: dict[str, str], found: dict[str, Rows]) -> str:
    """The facts, and a table for each part."""
    lines = [", ".join(f"{key} {value}" for key, value in about.items()), ""]
    for part, rows in found.items():
        heads = list(dict.fromkeys(key for row in rows for key in row))
        lines += [f"### {part}", "", _line(heads), _line(["---"] * len(heads))]
        lines += [_line([_shown(row.get(head)) for head in heads]) for row in rows]
        lines.append("")
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def main() -> None:
    """Run all parts, and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all parts")
    parser.add_argument("--only", action="append", help="parts whose names have this in them")
    options = parser.parse_args()
    about, began = facts(), time.monotonic()
    small = gpu_speed.device().type == "cpu"
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    found: dict[str, Rows] = {}
    known = parts(small)
    for name in (n for n in (*known, "tests") if _is_asked(n, options.only)):
        left = options.limit - (time.monotonic() - began)
        if left <= 10:
            found[name] = [{"failed": "no time was left"}]
        elif name == "tests":
            found[name] = run_tests(min(left, TESTS_S))
        else:
            found[name] = run_part(
                known[name], min(left, (3 if small else 1) * known[name].limit_s)
            )
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        write(options.out, about, found)
    print(markdown(about, found))


def _is_asked(name: str, only: list[str] | None) -> bool:
    return not only or any(word in name for word in only)


def write(folder: Path, about: dict[str, str], found: dict[str, Rows]) -> None:
    """Write what the parts so far have found."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": about, "found": found}, indent=1)
    (folder / "gpu.json").write_text(text + "\n", encoding="utf-8")
    (folder / "gpu.md").write_text(markdown(about, found), encoding="utf-8")


if __name__ == "__main__":
    main()
