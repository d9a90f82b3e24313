"""Tells how many bytes tensors may still take, on a device and in the memory of this machine."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NO_LIMIT = 2**60  # bytes; a cgroup of version 1 has more where it has no limit
# versions 2 and 1: the name in /proc/self/cgroup, the folder, and the files of limit and use
_OF_CGROUPS = (
    ("", "", "memory.max", "memory.current"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors may still take on a device; None where it does not tell."""
    if device.type in ("cpu", "meta"):
        return None
    there: Any = torch.get_device_module(device)
    with suppress(AttributeError, NotImplementedError, RuntimeError):
        cached = there.memory_reserved(device) - there.memory_allocated(device)
        with suppress(AttributeError, NotImplementedError, RuntimeError):
            return int(there.mem_get_info(device)[0]) + cached
        total = there.get_device_properties(device).total_memory  # some drivers of Intel GPUs
        return int(total - there.memory_allocated(device))
    return None


def free_here() -> tuple[int, str]:
    """Return the bytes that this process may still take of the machine's memory, and why no more.

    Where the system does not tell, they are all that the machine has.
    """
    found = [(left, where) for where, left in limits()]
    if not found:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "in this machine"
    least, where = min(found)
    return max(0, least), where


def limits() -> Iterator[tuple[str, int]]:
    """Yield bytes that this process may still take, by the reason in words; none but on Linux."""
    with suppress(OSError, ImportError):
        import resource  # Windows lacks it

        own = _table("/proc/self/status")
        for limit, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            bytes_, _ = resource.getrlimit(limit)
            if bytes_ != resource.RLIM_INFINITY:
                yield "within the limit of this process", bytes_ - own[used]
        yield "in this machine", _table("/proc/meminfo")["MemAvailable"]
        lines = os.fsdecode(_OWN_CGROUPS.read_bytes()).splitlines()
        groups = {line.split(":")[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
        for name, place, limit, held in _OF_CGROUPS:
            folder = Path(_CGROUPS, place, groups.get(name, ""))
            if name in groups and (folder / limit).exists():
                most = (folder / limit).read_text(encoding="utf-8").strip()
                if most != "max" and int(most) < _NO_LIMIT:
                    used = int((folder / held).read_text(encoding="utf-8"))
                    yield "within the limit of this cgroup", int(most) - used


def _table(path: str) -> dict[str, int]:
    """Return the bytes in a table of Linux, whose rows are like `VmData:  12 kB`.

    One row is the name of the process, which Linux cuts after 15 bytes, also within a letter.
    """
    rows = (line.split() for line in os.fsdecode(Path(path).read_bytes()).splitlines())
    return {row[0][:-1]: int(row[1]) * 1024 for row in rows if row[-1] == "kB"}
