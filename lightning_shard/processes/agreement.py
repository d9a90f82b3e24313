"""Compares in the store what must be equal on all ranks, before a collective could hang on it.

Each rank writes a digest of what it has; rank 0 reads all and writes a verdict, which every rank
raises.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_shard.processes.errors import LightningShardError
from lightning_shard.processes.store import no_answer

STAY_S = 2.0  # rank 0 stays so long after a difference was found
SHOWN = 200  # characters of a value
POLL_S = 0.1  # at most, between two looks for what another rank writes
WORD_S = 60.0  # until the first word on who is waited for: starts on busy machines take 30 s
CHECK_S = 1.0  # between two looks for its failure
Check = Callable[[Sequence[int]], None]

_names = 0
PROCESS_STATE = {"_names": _names}


class DisagreementError(LightningShardError, ValueError):
    """Says that ranks differ in something that must be equal; every rank raises it."""


def only_wait(ranks: Sequence[int]) -> None:
    """Look for no failure of the ranks that are waited for: nobody watches yet."""


def next_name(what: str) -> str:
    """Name the next comparison of this process; the ranks make theirs in the same order."""
    global _names
    _names += 1
    return f"lightning_shard/{what}_{_names}"


def agree(
    store: Any,
    name: str,
    same: Mapping[str, str],
    *,
    rank: int,
    world_size: int,
    remedy: str,
    timeout_s: float,
    device: str | None = None,
    devices: tuple[str, int] | None = None,
    check: Check = only_wait,
) -> None:
    """Raise on all ranks if they differ. All ranks must call it.

    Args:
        store: A torch.distributed store that all ranks reach.
        name: The name of this comparison; each is made once.
        same: The values that must be equal on all ranks, by name.
        rank: The rank of this process.
        world_size: Number of processes.
        remedy: The advice at the end of the sentence on a difference.
        timeout_s: Seconds to wait for the others.
        device: A name of this rank's device, which no other rank may have.
        devices: The node of this rank, and the number of devices that this process sees, which is
            equal on all ranks of a node; None: it does not matter.
        check: Raises if one of the ranks that are waited for does not come any more.

    Raises:
        DisagreementError: Two ranks differ; the first difference.
        TimeoutError: A rank is missing after `timeout_s`.
    """
    text = json.dumps({"the number of processes": str(world_size), **same})
    store.set(f"{name}/{rank}/facts", text)
    store.set(f"{name}/{rank}", json.dumps([_digest(text), device, devices]))
    if rank == 0:
        try:
            entries = _read(store, name, world_size, timeout_s, check)
        except TimeoutError as err:
            store.set(f"{name}/verdict", json.dumps([str(err), world_size]))
            _stay_until_read(store, name, world_size)
            raise
        verdict = _verdict(store, name, entries, remedy)
        store.set(f"{name}/verdict", json.dumps([verdict, world_size]))
        if verdict:
            _stay_until_read(store, name, world_size)
    else:
        key = f"{name}/verdict"
        try:
            # rank 0 says first who is missing
            _wait(store, key, time.monotonic() + timeout_s + 10, lambda: check([0]))
        except TimeoutError as err:
            raise no_answer(rank, world_size, timeout_s) from err
        verdict, expected = json.loads(store.get(key))
        if verdict:
            store.add(f"{name}/read", 1)
        if not verdict and expected != world_size:
            verdict = (
                f"the number of processes is {expected} on rank 0 and {world_size} on rank {rank}; "
                "start all processes with the same number."
            )
    if verdict:
        raise DisagreementError(verdict)


def _stay_until_read(store: Any, name: str, world_size: int) -> None:
    """Wait until the others know what is wrong: rank 0 may hold the store, which ends with it."""
    deadline = time.monotonic() + STAY_S
    while store.add(f"{name}/read", 0) < world_size - 1 and time.monotonic() < deadline:
        time.sleep(0.05)


def _verdict(store: Any, name: str, entries: list[Any], remedy: str) -> str:
    """The first difference; "" if there is none."""
    holder: dict[str, int] = {}
    seen: dict[str, tuple[int, int]] = {}
    for rank, (digest, device, devices) in enumerate(entries):
        if digest != entries[0][0]:
            first, other = (json.loads(store.get(f"{name}/{r}/facts")) for r in (0, rank))
            key = next(key for key in [*first, *other] if first.get(key) != other.get(key))
            return (
                f"{key} is {_shown(first.get(key))} on rank 0 and {_shown(other.get(key))} on "
                f"rank {rank}; {remedy}."
            )
        if devices is not None:
            first, number = seen.setdefault(devices[0], (rank, devices[1]))
            if number != devices[1]:
                return (
                    f"rank {first} sees {number} of the devices of {devices[0]} and rank {rank} "
                    f"sees {devices[1]}; let each process see one device, its own, or all of them."
                )
        if device is not None and holder.setdefault(device, rank) != rank:
            return (
                f"ranks {holder[device]} and {rank} use the same device, {device}; start one "
                "process for each device of a node, and let each see its own or all of them."
            )
    for rank in range(len(entries)):
        store.delete_key(f"{name}/{rank}/facts")
    return ""


def _read(store: Any, name: str, world_size: int, timeout_s: float, check: Check) -> list[Any]:
    """Read what each rank has written; now and then, print the ranks that are waited for."""
    begun = time.monotonic()
    next_word, deadline = begun + WORD_S, begun + timeout_s
    entries: list[Any] = []

    def missing() -> list[int]:
        return [r for r in range(len(entries), world_size) if not store.check([f"{name}/{r}"])]

    def look() -> None:
        nonlocal next_word
        check(missing())
        if time.monotonic() > next_word:
            waited = time.monotonic() - begun
            print(
                f"rank 0 has waited {waited:.0f} s for the ranks {missing()} of {world_size}, and "
                f"gives up after {timeout_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            next_word += 4 * waited

    for rank in range(world_size):
        key = f"{name}/{rank}"
        try:
            _wait(store, key, deadline, look)
        except TimeoutError as err:
            raise TimeoutError(
                f"the ranks {missing()} of {world_size} have not arrived after {timeout_s:.0f} s; "
                "see what they have printed, and whether they were started."
            ) from err
        entries.append(json.loads(store.get(key)))
    return entries


def _wait(store: Any, key: str, deadline: float, check: Callable[[], None]) -> None:
    """Wait for a key, and call `check` every second; torch would log each wait that ends early.

    Raises:
        TimeoutError: It is not there at the deadline.
        torch.distributed.DistNetworkError: The store has ended.
    """
    pause_s, next_check = 0.001, time.monotonic() + CHECK_S
    while not store.check([key]):
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"no {key} in the store")
        if now > next_check:
            check()
            next_check = time.monotonic() + CHECK_S
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shown(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}..."
