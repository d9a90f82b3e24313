"""Starts the process group of a script without a Trainer, and of the Trainer."""

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.processes.agreement import agree
from lightning_shard.processes.arguments import check_timeout
from lightning_shard.processes.cpu_settings import tune_process
from lightning_shard.processes.device import (
    available_backends,
    default_backend,
    device_of,
    own_device,
    present,
)
from lightning_shard.processes.failures.linux_processes import note_process
from lightning_shard.processes.failures.orphans import ends_with_starter
from lightning_shard.processes.process_info import process_info
from lightning_shard.processes.store import (
    connect,
    names_of_this_start,
    note_group,
    store_of_attempt,
)
from lightning_shard.processes.variables import ProcessInfo


def start_process_group(
    device_type: str | None = None, *, backend: str | None = None, timeout_s: float = 1800.0
) -> ProcessInfo:
    """Start torch's default process group, under any launcher.

    The current device is set first. Before the first collective the ranks compare, through their
    store, their number, their versions of torch and of this package, and their devices. A group
    that runs already is kept, so a cell of a notebook may run twice.

    Args:
        device_type: "cuda", "xpu" or "cpu"; by default the first that this machine has.
        backend: By default the device's: nccl, xccl or gloo.
        timeout_s: Seconds to wait for the other processes, now and in collectives.

    Returns:
        The place of this process; ask `process_info()` again wherever it is needed.

    Raises:
        ValueError: `timeout_s` is no positive number, the ranks differ, two of them use one device,
            the backend is unknown, or a group of another backend runs already.
        RuntimeError: There is no such device, or rank 0 is not reached.
        TimeoutError: Not all processes arrive.
    """
    check_timeout(timeout_s)
    info = process_info()
    device = own_device(device_type or present(), info.local_rank, info.local_world_size)
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device)
    if dist.is_initialized():
        running = str(dist.get_backend_config())
        if backend not in (None, dist.get_backend(), running):
            raise ValueError(
                f"a process group of {running} runs already, and backend={backend!r} is another; "
                "leave out the backend, or end the group with torch.distributed."
                "destroy_process_group() first."
            )
        return info
    backend = backend or default_backend(device)
    join(
        info.rank,
        info.world_size,
        f"{info.address}:{info.port}",
        device=device,
        backend=backend,
        timeout_s=timeout_s,
    )
    return info


def check_backend(backend: str) -> None:
    """Refuse a backend that this torch does not have, of one name or of `cpu:gloo,cuda:nccl`.

    Raises:
        ValueError: With the names of those that it has.
    """
    for part in backend.split(","):
        name = part.rpartition(":")[2].lower()
        if not dist.is_backend_available(name):
            raise ValueError(
                f"process group backend {backend!r}: {name!r} is unknown to this torch, "
                f"{torch.__version__}; use one of {', '.join(available_backends())}."
            )


@ends_with_starter()
def join(
    rank: int,
    world_size: int,
    address: str,
    *,
    device: torch.device,
    backend: str,
    timeout_s: float,
) -> None:
    """Meet the other ranks at `address` (host:port), compare, and start the process group."""
    check_backend(backend)
    store = connect(rank, world_size, address, timeout_s)
    carries_devices = device.type != "cpu" and "gloo" not in backend.split(",")
    with names_of_this_start(store, rank, world_size, address, timeout_s) as store:
        agree(
            store,
            "lightning_shard/start",
            {"the version of torch": torch.__version__, "the process group backend": backend},
            rank=rank,
            world_size=world_size,
            remedy="start all ranks with the same software and options",
            timeout_s=timeout_s,
            device=_identity(device) if carries_devices else None,
            devices=_seen(device) if carries_devices else None,
        )
    if device.type == "cpu":
        tune_process(world_size)
    place: dict[str, Any] = {} if device.type == "cpu" else {"device_id": device}
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, **place
    )
    note_group()
    note_process(store_of_attempt(), rank)


def _seen(device: torch.device) -> tuple[str, int]:
    """Return the name of this node, and the number of its devices that this process sees."""
    return socket.gethostname(), device_of(device.type).count()


def _identity(device: torch.device) -> str:
    """Return a string that is equal in two processes exactly if they use the same device."""
    properties = torch.get_device_module(device.type).get_device_properties(device)
    if uuid := getattr(properties, "uuid", None):
        return f"{properties.name} {uuid} of {socket.gethostname()}"
    shown = os.environ.get(device_of(device.type).shown_by, "")
    return f"{device} ({shown}) of {socket.gethostname()}"
