"""The facts that an issue needs: versions, devices, launchers, folders, and a try of two ranks."""

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_shard.cli.usage import ENV_PREFIX, labelled
from lightning_shard.processes.device import accelerators, available_backends
from lightning_shard.processes.launch import launch
from lightning_shard.processes.process_info import LAUNCHERS

PACKAGES = (
    "lightning-shard lightning torch jsonargparse numpy neuraloperator transformers torchvision "
    "safetensors zarr h5py"
).split()
ALWAYS_SHOWN = {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}


def doctor(_: argparse.Namespace) -> None:
    """Print the report, and exit with 1 if two processes cannot form a group."""
    for lines in (_versions(), _devices(), _surroundings(), _folders()):
        print("\n".join(lines))
    works, sentence = try_two_processes()
    print(labelled("two processes", sentence))
    if not works:
        sys.exit(1)


def try_two_processes() -> tuple[bool, str]:
    """Try a gloo group of two processes that add a number: whether it works, and a sentence."""
    start = time.monotonic()
    try:
        found = launch(_sum_of_ranks, processes=2, timeout_s=60.0)
    except Exception as err:  # whatever fails here is the finding
        reason = str(err).strip().splitlines() or [""]
        return False, f"FAILED: {type(err).__name__}: {reason[-1]}"
    if found != [1.0, 1.0]:
        return False, f"FAILED: gloo added 0 and 1 to {found}"
    return True, f"gloo works ({time.monotonic() - start:.1f} s)"


def _sum_of_ranks() -> float:
    x = torch.tensor(float(dist.get_rank()), device="cpu")
    dist.all_reduce(x)
    return x.item()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> Iterator[str]:
    yield labelled("system", f"{platform.platform()}, Python {platform.python_version()}")
    yield from (labelled(name, _version(name)) for name in PACKAGES)


def _devices() -> Iterator[str]:
    yield labelled("cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    for row in accelerators():
        count = row.count()
        names = sorted({str(row.module.get_device_name(i)) for i in range(count)})
        yield labelled(row.type, f"{count} x {', '.join(names)}" if count else "no device")
    backends = available_backends()
    yield labelled("backends", ", ".join(backends) or "none")


def _surroundings() -> Iterator[str]:
    commands = dict.fromkeys(row.command for row in LAUNCHERS if row.command)
    found = [f"{name} ({path})" for name in commands if (path := shutil.which(name))]
    yield labelled("launchers", ", ".join(found) or "none on the PATH")
    known = ALWAYS_SHOWN.union(*(row.variables() for row in LAUNCHERS))
    shown = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name in known or name.startswith(f"{ENV_PREFIX}_")
    ]
    yield labelled("variables", " ".join(shown) or "none of a launcher")


def _folders() -> Iterator[str]:
    places = (
        ("this folder", Path.cwd()),
        ("temporary", Path(tempfile.gettempdir())),
        ("shared memory", Path("/dev/shm")),  # DataLoader's workers use it
    )
    for name, place in places:
        if not place.is_dir():
            yield labelled(name, f"{place} does not exist")
            continue
        free = f"{shutil.disk_usage(place).free / 2**30:.1f} GiB free"
        try:
            with tempfile.TemporaryFile(dir=place):
                yield labelled(name, f"{place} can be written, {free}")
        except OSError as err:
            yield labelled(name, f"{place} cannot be written: {err.strerror}")
