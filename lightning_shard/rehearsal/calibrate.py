"""Measures what collectives take on the links of this machine, for replayed steps."""

import bisect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.processes.simulated.collectives import sent_bytes
from lightning_shard.rehearsal.timeline import Collective, Cost

SIZES = (64, 4_096, 65_536, 1_048_576, 8_388_608)  # bytes that a rank sends
ROUNDS, MANY, FEW_BYTES = 5, 20, 65_536  # so many calls in a round of few bytes, and else two
_Made = tuple[Any, Callable[[], Any]]
_Make = Callable[[dist.ProcessGroup, int, int], _Made]
_ALIKE = {  # collectives that are measured, for all that are called
    "all_to_all": "all_to_all_single",
    "all_gather": "all_gather_single",
    "reduce_scatter": "reduce_scatter_single",
    "broadcast": "all_reduce",
    "reduce": "all_reduce",
    "barrier": "all_reduce",
    "send": "all_to_all_single",
    "recv": "all_to_all_single",
    "scatter": "all_to_all_single",
    "gather": "all_gather_single",
}


@dataclass(frozen=True)
class MeasuredLinks:
    """What collectives took, by name and number of ranks.

    Attributes:
        costs: For each, pairs of bytes sent and the cost, by growing bytes.
    """

    costs: dict[tuple[str, int], list[tuple[int, Cost]]]

    def cost(self, collective: Collective) -> Cost:
        """What a collective takes, between the sizes that were measured."""
        ranks = len(collective.members)
        if ranks == 1:
            return Cost(0.0, 0.0)
        name = _ALIKE.get(collective.name, collective.name)
        sizes = [known for kind, known in self.costs if kind == name]
        points = self.costs[name, min(sizes, key=lambda known: abs(math.log(known / ranks)))]
        return _between(points, collective.sent)


def _between(points: Sequence[tuple[int, Cost]], sent: int) -> Cost:
    place = min(max(1, bisect.bisect(points, sent, key=itemgetter(0))), len(points) - 1)
    (low, first), (high, last) = points[place - 1 : place + 1]
    part = max(0.0, (sent - low) / (high - low))
    return Cost(
        first.busy + part * (last.busy - first.busy), first.link + part * (last.link - first.link)
    )


def measured_links(sizes: Sequence[int]) -> MeasuredLinks:
    """Measure in the process group that is there, in groups of so many ranks side by side.

    All ranks must call it, and get the same.
    """
    found: dict[tuple[str, int], list[tuple[int, Cost]]] = {}
    for ranks in sorted({size for size in sizes if size > 1}):
        group, _ = dist.new_subgroups(ranks)
        for name, make in _CALLS.items():
            found[name, ranks] = [_measured(name, make, group, size) for size in SIZES]
    everyone: list[dict[tuple[str, int], list[tuple[int, Cost]]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return MeasuredLinks({key: _medians([each[key] for each in everyone]) for key in found})


def _medians(found: Sequence[list[tuple[int, Cost]]]) -> list[tuple[int, Cost]]:
    return [
        (same[0][0], Cost(median(c.busy for _, c in same), median(c.link for _, c in same)))
        for same in zip(*found, strict=True)
    ]


def _measured(name: str, make: _Make, group: dist.ProcessGroup, size: int) -> tuple[int, Cost]:
    ranks, place = dist.get_world_size(group), dist.get_rank(group)
    data, call = make(group, ranks, max(1, size // 4))
    call()
    calls = MANY if size <= FEW_BYTES else 2
    seen: list[Cost] = []
    for _ in range(ROUNDS):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        seen.append(Cost(min(cpu, wall) / calls, max(0.0, wall - cpu) / calls))
    middle = sorted(seen, key=lambda cost: cost.busy + cost.link)[ROUNDS // 2]
    return sent_bytes(name, data, place, ranks), middle


# Each of these makes what a rank brings of so many numbers that it sends, and the call.


def _all_to_all(group: dist.ProcessGroup, ranks: int, count: int) -> _Made:
    source = torch.ones(max(1, count // (ranks - 1)) * ranks)
    place = torch.empty_like(source)
    call = partial(dist.all_to_all_single, place, source, group=group)
    return (source, place, (), ()), call


def _all_reduce(group: dist.ProcessGroup, ranks: int, count: int) -> _Made:
    data = torch.zeros(max(1, count * ranks // (ranks - 1) // 2))
    return [data], partial(dist.all_reduce, data, group=group)


def _all_gather(group: dist.ProcessGroup, ranks: int, count: int) -> _Made:
    part = torch.ones(max(1, count // (ranks - 1)))
    whole = torch.empty(len(part) * ranks)
    return (part, whole), partial(dist.all_gather_into_tensor, whole, part, group=group)


def _reduce_scatter(group: dist.ProcessGroup, ranks: int, count: int) -> _Made:
    part = torch.empty(max(1, count // (ranks - 1)))
    whole = torch.zeros(len(part) * ranks)
    return (whole, part), partial(dist.reduce_scatter_tensor, part, whole, group=group)


_CALLS: dict[str, _Make] = {
    "all_to_all_single": _all_to_all,
    "all_reduce": _all_reduce,
    "all_gather_single": _all_gather,
    "reduce_scatter_single": _reduce_scatter,
}
