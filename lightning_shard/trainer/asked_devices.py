"""Reads which devices a Trainer is asked for."""

from typing import Any

import torch

from lightning_shard.processes.device import accelerators, sees_own_device_only
from lightning_shard.processes.process_info import launcher, process_info


def meant(accelerator: Any) -> Any:
    """Return this machine's device for "auto" and "gpu" where Lightning would not find it."""
    there = [row for row in accelerators() if row.module.is_available()]
    if accelerator in ("auto", "gpu") and not all(row.found_by_lightning for row in there):
        return there[0].type
    return accelerator


def count_of(devices: Any) -> int | None:
    """Count the devices that an option asks for on one node; None if Lightning chooses."""
    if isinstance(devices, str) and not devices.isdigit():
        numbers = [part for part in devices.split(",") if part.strip()]
        return len(numbers) if "," in devices else None
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return int(devices) if int(devices) >= 0 else None


def device_kind(accelerator: Any) -> str | None:
    """Return the type of the devices asked for; None for the CPU, Apple's GPU and other names."""
    rows = accelerators()
    if accelerator in [row.type for row in rows]:
        return accelerator
    if accelerator != "gpu" or torch.backends.mps.is_available():
        return None
    return next(row.type for row in rows if row.found_by_lightning)


def names_all(accelerator: Any, devices: Any) -> bool:
    """Return whether devices of all processes of this node are asked for, each of which sees one.

    Raises:
        ValueError: The variables of the launcher contradict each other.
    """
    started = process_info() if launcher().starts_all else None
    kind = device_kind(accelerator)
    if started is None or kind is None or count_of(devices) != started.local_world_size:
        return False
    return sees_own_device_only(kind, started.local_world_size)
