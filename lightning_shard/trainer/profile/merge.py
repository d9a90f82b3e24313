"""Makes one file of the traces of all ranks, and one table of what their modules took."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_shard.trainer.profile.clock import Clock
from lightning_shard.trainer.profile.trace import Event, Trace, Usage

SHOWN = 20  # modules
_IDS = 1_000_000  # process numbers of a rank
_NAMES = ("process_name", "process_sort_index")


def events_of_rank(trace: Trace, rank: int, base_ns: int, clock: Clock) -> bytes:
    """Write the events of a rank as JSON, compressed, on rank 0's clock.

    Args:
        trace: Of this rank.
        rank: Its number, which becomes part of the numbers of its processes.
        base_ns: The time of this rank's clock from which its events count.
        clock: Of this rank.
    """
    shift_us = (base_ns - clock.ahead - clock.begin) / 1000
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
    """One Chrome trace, compressed, of the events of all ranks."""
    text = b",".join(gzip.decompress(part) for part in parts)
    return gzip.compress(b'{"displayTimeUnit": "ms", "traceEvents": [' + text + b"]}", 6)


def mean_usage(ranks: Sequence[Mapping[str, Usage]], steps: int) -> dict[str, Usage]:
    """What each module took for a step on a rank, as means; the longest first."""
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
    """Lines for a terminal: a module each, and the sum."""
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
