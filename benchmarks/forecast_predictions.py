"""Predicts the steps that `benchmarks.forecast_runs` measures."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks import slow_links
from benchmarks.forecast import Case
from benchmarks.forecast_runs import task_and_data
from lightning_shard.rehearsal.batches import first_batches
from lightning_shard.rehearsal.calibrate import MeasuredLinks, measured_links
from lightning_shard.rehearsal.lone_steps import Training, timed_together
from lightning_shard.rehearsal.timeline import Cost, Replay, Timeline

Stored = list[list[Any]]  # of each collective its name and ranks, and the costs by bytes


def links(rates: Sequence[float | None]) -> dict[str, Stored]:
    """What collectives take on links of each rate; every rank of the group calls it."""
    found: dict[str, Stored] = {}
    ranks = dist.get_world_size()
    for rate in rates:
        slow_links.limit_link(None if rate is None else rate * 1e9)
        costs = measured_links([n for n in (2, 4) if n <= ranks]).costs
        found[f"{ranks}, {rate}"] = [
            [*kind, [[sent, cost.busy, cost.link] for sent, cost in points]]
            for kind, points in costs.items()
        ]
    return found


def _read(stored: Stored) -> MeasuredLinks:
    return MeasuredLinks({
        (name, ranks): [(sent, Cost(busy, link)) for sent, busy, link in points]
        for name, ranks, points in stored
    })  # fmt: skip


def predicted(cases: Iterable[Case], stored: dict[str, Stored], steps: int) -> list[Case]:
    """The cases with what is predicted of them; each mesh is timed once, for all links."""
    timed: dict[Any, list[tuple[Timeline, ...]]] = {}
    found: list[Case] = []
    for case in cases:
        key = case["network"], tuple(case["mesh"])
        if key not in timed:
            task, data = task_and_data(case["network"], 1)
            batch = first_batches(task, data, "fit")[0]
            timed[key] = timed_together(Training(task, None, batch, key[1]), steps)
        known = _read(stored.get(f"{case['ranks']}, {case['gigabits']}", []))
        found.append(case | {"predicted": _replayed(timed[key], known)})
    return found


def _replayed(steps: Sequence[tuple[Timeline, ...]], known: MeasuredLinks) -> dict[str, float]:
    """Of the rank that needs most, the median of the steps."""
    slowest = [max(Replay(each, known.cost).run(), key=lambda r: r.seconds) for each in steps]
    return {
        "seconds": median(r.seconds for r in slowest),
        "computed": median(r.computed for r in slowest),
        "busy": median(r.busy for r in slowest),
        "waited": median(sum(r.waited.values()) for r in slowest),
        "hidden": median(r.hidden for r in slowest),
    }
