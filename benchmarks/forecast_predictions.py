"""Predicts the steps that `benchmarks.forecast_runs` measures."""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks import slow_links
from benchmarks.forecast import Case, Mesh
from benchmarks.forecast_runs import Timed, task_and_data
from lightning_shard import predict, read_cluster
from lightning_shard.lab.calibrate import measured_links
from lightning_shard.lab.machine import Cost, MeasuredLinks
from lightning_shard.lab.replay import Replay
from lightning_shard.lab.timeline import Timeline

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


def predicted(cases: Iterable[Case], stored: dict[str, Stored], timed: Timed) -> list[Case]:
    """The cases with what is predicted of them, where links and steps are known."""
    found: list[Case] = []
    for case in cases:
        steps = timed.get((case["network"], tuple(case["mesh"])))
        known = stored.get(f"{case['ranks']}, {case['gigabits']}")
        if steps and (known or case["ranks"] == 1):
            time_ = _replayed(steps, _read(known or []))
            memory = _memory(case["network"], tuple(case["mesh"]))
            found.append(case | {"predicted": time_ | {"memory": memory}})
    return found


@cache
def _memory(network: str, mesh: Mesh) -> int:
    """The peak of bytes, which is the same on all devices."""
    cluster = read_cluster(f"{math.prod(mesh)}xH100")
    return predict(*task_and_data(network, 1), mesh, cluster).memory


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
