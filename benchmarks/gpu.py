"""Measures a GPU in one command, in less than nine minutes, without a network.

    python -m benchmarks.gpu --out outputs/gpu
    python -m benchmarks.gpu --only exactness --only parameters

Runs the tests marked gpu; exactness of split fields on 2 and 4 ranks that share the GPU over gloo,
in float64, in float32 with and without TF32 and in bfloat16; training with whole and with sharded
parameters; the device's own collectives, on one rank for each GPU; the strategy on one device
beside plain Lightning; the spectral convolution beside neuraloperator's; compiled blocks, CUDA
graphs, peak memory; activations on the host, with and without fetching ahead, and within budgets;
inference and training in tiles. Writes gpu.json and gpu.md after each part. A machine without a GPU
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import spawn

from benchmarks import gpu_parts
from benchmarks.gpu_parts import Rows

LIMIT_S = 510.0  # of the whole command
ROOT = Path(__file__).parents[1]


def parts(small: bool) -> dict[str, tuple[int, str, Callable[..., Rows], tuple[Any, ...]]]:
    """For each part its ranks, its backend, its function and the arguments."""
    resolution, kind = (64 if small else 256), gpu_parts.device().type
    names = ["U-Net", "ViT", "TFNO"]
    fields = [(64, 64)] if small else [(1024, 1024), (2048, 2048), (128, 128, 128)]
    own = dist.get_default_backend_for_device(kind)
    devices = 1 if small else torch.accelerator.device_count()
    return {
        "exactness, 2 ranks on one device": (2, "gloo", gpu_parts.exactness, (names, resolution)),
        "exactness, 4 ranks on one device": (4, "gloo", gpu_parts.exactness, (names, resolution)),
        "parameters, 2 ranks on one device": (
            2, "gloo", gpu_parts.parameters, (names[:2], resolution),
        ),
        f"{own}, {devices} ranks": (devices, own, gpu_parts.collective, (resolution,)),
        "strategy on one device": (
            0, "", gpu_parts.one_device, (resolution, 5 if small else 40),
        ),
        "spectral convolution": (1, own, gpu_parts.spectral, (fields, 16 if small else 32)),
        "compiled": (1, own, gpu_parts.compiled, (resolution if small else 512,)),
        "activations on the host": (1, own, gpu_parts.offloaded, (resolution if small else 2048,)),
        "budgets of memory": (1, own, gpu_parts.paged, (resolution if small else 2048,)),
        "tiles": (0, "", gpu_parts.tiled, (resolution if small else 2048,)),
    }  # fmt: skip


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


def run_part(part: tuple[int, str, Callable[..., Rows], tuple[Any, ...]], limit_s: float) -> Rows:
    """The rows of a part, run in processes of its own; one that fails or hangs says so in a row."""
    ranks, backend, function, args = part
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    given = (max(ranks, 1), port, backend, results, function, args)
    started: Any = spawn(_serve, given, nprocs=max(ranks, 1), join=False)
    deadline = time.monotonic() + limit_s
    try:
        while not started.join(timeout=max(0.1, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                return [{"failed": f"no end after {limit_s:.0f} s"}]
    except Exception as error:  # of any kind: it becomes the row of this part
        return [{"failed": str(error).strip().splitlines()[-1]}]
    finally:
        for process in started.processes:
            process.kill()
    return results.get()


def _serve(
    rank: int, ranks: int, port: int, backend: str, results: Any, function: Any, args: Any
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # ranks that share a device have the same local rank, by which torch's meshes choose theirs
    local = rank % max(torch.accelerator.device_count(), 1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(local)}
    if gpu_parts.device().type == "cpu":
        torch.set_num_threads(1)
    if backend:
        if backend not in ("gloo", "mpi"):
            torch.accelerator.set_device_index(local)
        dist.init_process_group(backend)
    else:  # a Trainer starts its own
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    rows = function(*args)
    if rank == 0:
        results.put(rows)
    if dist.is_initialized():
        dist.destroy_process_group()


def facts() -> dict[str, str]:
    """The machine and the versions."""
    kind = gpu_parts.device().type
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
    small = gpu_parts.device().type == "cpu"
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    found: dict[str, Rows] = {}
    chosen = [n for n in ("tests", *parts(small)) if _is_asked(n, options.only)]
    for name in chosen:
        left = options.limit - (time.monotonic() - began)
        limit = min(left, options.limit / 3)  # one that hangs leaves time for those after it
        if left <= 10:
            found[name] = [{"failed": "no time was left"}]
        else:
            found[name] = (
                run_tests(limit) if name == "tests" else run_part(parts(small)[name], limit)
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
