"""Makes the pager of the tiles of a device, with the memory and the budget that suit it."""

from pathlib import Path

import torch

from lightning_shard.memory.free import free_bytes
from lightning_shard.memory.paging.file_memory import FileMemory
from lightning_shard.memory.paging.pager import Pager
from lightning_shard.memory.paging.sleep import Sleep, allocated_on
from lightning_shard.processes.cpu_settings import return_freed_memory


def pager_of(
    device: torch.device, budget: int | None = None, folder: str | Path | None = None
) -> Pager | None:
    """Return the pager of tiles on a device; None on a CPU without files, where nothing moves.

    Args:
        device: The device of all tiles.
        budget: Bytes that may stay there beside those of before; 0: as many as the largest operator
            needs. None: half of what is free on the device as this is called, if it tells that.
        folder: A directory in whose files waits what is not there; None: the host's memory.

    Raises:
        ValueError: There is no such directory, or no file can be made in it.
    """
    memory = None if folder is None else FileMemory(folder)
    if memory is None and device.type == "cpu":
        return None
    if device.type == "cpu":
        return_freed_memory()
    if budget is None and device.type != "cpu":
        budget = (free_bytes(device) or 0) // 2  # the rest is for workspaces of kernels
    sleep = None
    if budget and device.type != "cpu" and allocated_on(device) is not None:
        sleep = Sleep(device, budget)
    return Pager(device, budget or 0, memory, sleep=sleep)
