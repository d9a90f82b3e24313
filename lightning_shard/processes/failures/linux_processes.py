"""Reads from Linux whether a process of this machine has ended."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def note_process(store: Any, rank: int) -> None:
    """Write into the store of the ranks which process this rank is."""
    store.set(f"process_of/{rank}", own_place())


def ended_among(store: Any, ranks: Sequence[int]) -> list[int]:
    """Return the ranks of `ranks` whose processes are seen to have ended, on this machine."""
    keys = {rank: f"process_of/{rank}" for rank in ranks}
    there = [rank for rank, key in keys.items() if store.check([key])]
    return [rank for rank in there if has_ended(store.get(keys[rank]).decode())]


def own_place() -> str:
    """Return a text of the machine and this process, which no other process has."""
    return f"{_machine()} {os.getpid()} {_started(os.getpid())}"


def has_ended(place: str) -> bool:
    """Return whether the process of an `own_place` has ended; False if it is on another machine."""
    machine, pid, started = place.split(" ")
    return machine == _machine() and _started(int(pid)) != started


def _machine() -> str:
    """Return the kernel and its space of process numbers, of which a container has its own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _started(pid: int) -> str:
    """Return when the process began, in ticks of the kernel; "" if it has ended."""
    fields = _fields(pid)
    return "" if not fields or fields[0] in ("Z", "X") else fields[19]


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, first the state; [] if it is gone.

    The name is bytes: Linux cuts it after 15 of them, also within a letter.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
