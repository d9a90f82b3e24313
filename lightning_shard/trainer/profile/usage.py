"""Adds up by module what torch's profiler has recorded under `labels`, and writes it as a table.

An event belongs to the innermost module around it. A node of the backward graph belongs to the
module whose operator made it: both have the same sequence number.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_shard.trainer.profile.labels import COLLECTIVE, MODULE, WAIT

SHOWN = 20  # modules
OUTSIDE = "(outside)"
_PARTS = {"Optimizer.": "(optimizer)", "enumerate(DataLoader)": "(loading data)"}
_OF_FSDP = re.compile(r"FSDP::\w+(?: \((.+)\))?")
_STEP, _NODE = "ProfilerStep", "autograd::engine::evaluate_function"


@dataclass
class Usage:
    """Counts what a module took in the recorded steps on one rank, without the modules in it.

    Attributes:
        compute_us: Time outside of collectives, of the device where there is one.
        waiting_us: Time in collectives.
        bytes: Bytes sent.
        calls: Number of collectives.
    """

    compute_us: float = 0.0
    waiting_us: float = 0.0
    bytes: float = 0
    calls: float = 0

    def add(self, other: "Usage") -> None:
        """Add the counts of another rank."""
        self.compute_us += other.compute_us
        self.waiting_us += other.waiting_us
        self.bytes += other.bytes
        self.calls += other.calls


def usage_by_module(events: Iterable[Any], steps: int) -> dict[str, Usage]:
    """Add up what each module took.

    Args:
        events: The events of torch's profiler.
        steps: The steps that count; the profiler begins one more when training ends.
    """
    roots = [e for e in events if e.cpu_parent is None and e.name.startswith(_STEP)]
    counted = sorted(roots, key=lambda event: event.time_range.start)[:steps]
    found, makers = dict[str, Usage](), dict[int, str]()
    waiting = [(event, OUTSIDE, False) for event in reversed(counted)]
    while waiting:  # forward comes before backward, whose nodes are of its operators
        event, module, waits = waiting.pop()
        module, waits = _module_of(event, module, makers), waits or _waits(event.name)
        usage = found.setdefault(module, Usage())
        if waits:
            usage.waiting_us += event.self_cpu_time_total
        else:
            usage.compute_us += event.self_device_time_total or event.self_cpu_time_total
        if event.name.startswith(COLLECTIVE):
            usage.bytes += int(event.name.rpartition(" ")[2])
            usage.calls += 1
        inside = sorted(event.cpu_children, key=lambda child: -child.time_range.start)
        waiting += [(child, module, waits) for child in inside]
    return found


def _module_of(event: Any, outer: str, makers: dict[int, str]) -> str:
    name: str = event.name
    if name.startswith(_NODE):
        return makers.get(event.sequence_nr, outer)
    if name.startswith(MODULE):
        return name.removeprefix(MODULE)
    if match := _OF_FSDP.match(name):
        return match[1] or "(FSDP2)"
    if outer.startswith("("):
        outer = next((part for start, part in _PARTS.items() if name.startswith(start)), outer)
    if event.sequence_nr >= 0:
        makers[event.sequence_nr] = outer
    return outer


def _waits(name: str) -> bool:
    return name.startswith((COLLECTIVE, WAIT))


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
