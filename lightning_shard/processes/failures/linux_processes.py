"""Which process a rank is, so that another one on its machine sees whether it has ended.

Linux tells of each process whether it has ended or is stopped.
"""

import os
from pathlib import Path


def own_place() -> str:
    """The machine and the process: no two processes have the same."""
    return f"{_machine()} {os.getpid()} {_started(os.getpid())}"


def has_ended(place: str) -> bool:
    """Whether that process has ended; False where it is on another machine."""
    machine, pid, started = place.split(" ")
    return machine == _machine() and _started(int(pid)) != started


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped, and neither continued nor ended."""
    return _fields(pid)[:1] == ["T"]


def _machine() -> str:
    """The kernel, and its space of process numbers, of which each container may have its own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _started(pid: int) -> str:
    """When the process began, in ticks of the kernel; "" if it has ended."""
    fields = _fields(pid)
    return "" if not fields or fields[0] in ("Z", "X") else fields[19]


def _fields(pid: int) -> list[str]:
    """What the kernel says of a process after its name: first its state; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
