"""Joins the traces of all ranks into one file, and their times by module into one table."""

import gzip
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.trainer.profile.trace import Event, Trace, Usage

SHOWN = 20  # modules
_IDS = 1_000_000  # process numbers of a rank
_NAMES = ("process_name", "process_sort_index")


def clock_shift_ns(device: torch.device) -> int:
    """Return the number to subtract from this rank's clock for times that all ranks share.

    No rank leaves a sum over ranks before each has entered it. So this rank's clock is ahead of
    rank 0's by at least its entry less rank 0's exit, and by at most its exit less rank 0's entry.
    Within these bounds the difference nearest to zero is taken: zero where the clocks agree, as on
    one node. All ranks must call it. One message of two numbers travels from each rank to all.

    Args:
        device: Device of the tensors that the process group carries.
    """
    before = after = time.time_ns()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return before
    for _ in range(2):  # the ranks come together in the first sum
        before = time.time_ns()
        one = torch.ones(1, device=device)
        dist.all_reduce(one)
        one.item()  # waits for the device
        after = time.time_ns()
    mine = torch.tensor([[before, after]], device=device)
    stamps = mine.new_empty(dist.get_world_size(), 2)
    dist.all_gather_into_tensor(stamps, mine)
    first_before, first_after = stamps[0].tolist()
    ahead = min(max(before - first_after, 0), after - first_before)
    return first_before + ahead


def events_of_rank(trace: Trace, rank: int, shift_ns: int) -> bytes:
    """Write the events of a rank as JSON, compressed, on a clock that all ranks share.

    Args:
        trace: The trace of this rank.
        rank: Its number, which becomes part of the numbers of its processes.
        shift_ns: Nanoseconds to add to the times of the trace.
    """
    shift_us = shift_ns / 1000
    numbers: dict[Any, int] = {}
    names: list[Event] = []
    kept = [e for e in trace.events if isinstance(e.get("pid"), int) and e["name"] not in _NAMES]
    for event in kept:
        process = event["pid"]
        if process not in numbers:
            numbers[process] = rank * _IDS + len(numbers)
            names += _names(rank, numbers[process], process)
        event["pid"] = numbers[process]
        if "ts" in event:
            event["ts"] = round(event["ts"] + shift_us, 3)
        if "id" in event:
            event["id"] = f"{rank}.{event['id']}"
    return gzip.compress(json.dumps([*names, *kept])[1:-1].encode(), 1)


def _names(rank: int, number: int, process: Any) -> list[Event]:
    facts = {"name": f"rank {rank} ({process})"}, {"sort_index": number}
    named = zip(_NAMES, facts, strict=True)
    return [{"ph": "M", "name": name, "pid": number, "args": args} for name, args in named]


def merged(parts: Sequence[bytes]) -> bytes:
    """Join the events of all ranks into one Chrome trace, compressed."""
    text = b",".join(gzip.decompress(part) for part in parts)
    return gzip.compress(b'{"displayTimeUnit": "ms", "traceEvents": [' + text + b"]}", 6)


def mean_usage(ranks: Sequence[Mapping[str, Usage]], steps: int) -> dict[str, Usage]:
    """Average over steps and ranks what each module took; the module that took longest is first."""
    total: dict[str, Usage] = {}
    for usages in ranks:
        for module, usage in usages.items():
            total.setdefault(module, Usage()).add(usage)
    n = steps * len(ranks)
    means = {
        module: Usage(u.compute_us / n, u.waiting_us / n, u.bytes / n, u.calls / n)
        for module, u in total.items()
    }
    order = sorted(means.items(), key=lambda item: -item[1].compute_us - item[1].waiting_us)
    return dict(order)


def table(usage: Mapping[str, Usage]) -> str:
    """Write a table for a terminal: a line for each module, and the sum."""
    rows = list(usage.items())
    shown, rest = rows[:SHOWN], rows[SHOWN:]
    if rest:
        shown.append((f"({len(rest)} more)", _sum(u for _, u in rest)))
    shown.append(("sum", _sum(u for _, u in rows)))
    wide = max(len("module"), *(len(name) for name, _ in shown))
    head = f"{'module':<{wide}}  {'compute ms':>10}  {'waiting ms':>10}  {'bytes':>12}  collectives"
    lines = [
        f"{name:<{wide}}  {u.compute_us / 1000:>10.2f}  {u.waiting_us / 1000:>10.2f}  "
        f"{u.bytes:>12,.0f}  {u.calls:>11.4g}"
        for name, u in shown
    ]
    return "\n".join([head, *lines])


def _sum(usages: Iterable[Usage]) -> Usage:
    total = Usage()
    for usage in usages:
        total.add(usage)
    return total
