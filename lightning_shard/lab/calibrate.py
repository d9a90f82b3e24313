"""Measures this machine: the times of kernels on its devices, and of collectives on its links."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.lab.kernels import measured_device, wait_for
from lightning_shard.lab.machine import (
    GB,
    Cluster,
    Cost,
    Device,
    Link,
    Measured,
    MeasuredLinks,
    Rates,
)
from lightning_shard.processes.device import DEVICES, device_of, own_device, present
from lightning_shard.processes.forking import belongs_to_a_group
from lightning_shard.processes.launch import launch
from lightning_shard.processes.process_info import process_info
from lightning_shard.processes.start import start_process_group
from lightning_shard.trainer.profile.traffic import sent_bytes

SIZES = (64, 4_096, 65_536, 1_048_576, 8_388_608)  # bytes that a rank sends
ROUNDS, MANY, FEW_BYTES = 5, 20, 65_536  # a round has 20 calls of few bytes, or 2 of more
SECONDS, SECONDS_BESIDE = 0.03, 0.004  # a kernel so long shows its rate: on the CPU, on a device
SHOWN = ("float32", "bfloat16", "float16", "float64")
_Made = tuple[Any, Callable[[], Any]]
_Make = Callable[[dist.ProcessGroup, int, int], _Made]


def measured_links(sizes: Sequence[int], device_type: str = "cpu") -> MeasuredLinks:
    """Measure collectives in the process group that is there; all ranks must call it.

    Args:
        sizes: Numbers of ranks. Groups of so many ranks measure side by side.
        device_type: The type of device whose tensors travel, as torch names it.

    Returns:
        Medians over all ranks, equal on each of them.
    """
    found: dict[tuple[str, int], list[tuple[int, Cost]]] = {}
    for ranks in sorted({size for size in sizes if size > 1}):
        group, _ = dist.new_subgroups(ranks)
        with torch.device(device_type):  # the current one
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
    device = torch.get_default_device()
    calls = MANY if size <= FEW_BYTES else 2
    seen: list[Cost] = []
    for _ in range(ROUNDS):
        dist.barrier()
        wait_for(device)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        wait_for(device)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        cpu = cpu if device.type == "cpu" else 0.0  # a device computes while its links work
        seen.append(Cost(min(cpu, wall) / calls, max(0.0, wall - cpu) / calls))
    middle = sorted(seen, key=lambda cost: cost.busy + cost.link)[ROUNDS // 2]
    return sent_bytes(name, data, place, ranks), middle


# Each of these makes the tensors of a rank that sends `count` numbers, and the call.


def _all_to_all(group: dist.ProcessGroup, ranks: int, count: int) -> _Made:
    source = torch.ones(max(1, count // (ranks - 1)) * ranks, device="cpu")
    place = torch.empty_like(source)
    call = partial(dist.all_to_all_single, place, source, group=group)
    return (source, place, (), ()), call


def _all_reduce(group: dist.ProcessGroup, ranks: int, count: int) -> _Made:
    data = torch.zeros(max(1, count * ranks // (ranks - 1) // 2), device="cpu")
    return [data], partial(dist.all_reduce, data, group=group)


def _all_gather(group: dist.ProcessGroup, ranks: int, count: int) -> _Made:
    part = torch.ones(max(1, count // (ranks - 1)), device="cpu")
    whole = torch.empty(len(part) * ranks, device="cpu")
    return (part, whole), partial(dist.all_gather_into_tensor, whole, part, group=group)


def _reduce_scatter(group: dist.ProcessGroup, ranks: int, count: int) -> _Made:
    part = torch.empty(max(1, count // (ranks - 1)), device="cpu")
    whole = torch.zeros(len(part) * ranks, device="cpu")
    return (whole, part), partial(dist.reduce_scatter_tensor, part, whole, group=group)


_CALLS: dict[str, _Make] = {
    "all_to_all_single": _all_to_all,
    "all_reduce": _all_reduce,
    "all_gather_single": _all_gather,
    "reduce_scatter_single": _reduce_scatter,
}


def calibrate(
    processes: int | None = None, device_type: str | None = None, seconds: float | None = None
) -> Cluster:
    """Measure this machine, or the ranks that a launcher has started, in about two minutes.

    All ranks measure at the same time, as they compute in a run: they share memory and caches.

    Args:
        processes: The number of ranks that are started here; None: one for each accelerator, or
            two on the CPU, and none beside those of a launcher.
        device_type: The type of device, as torch names it; None: the first that this machine has.
        seconds: The length of each kernel that decides a rate; None: as long as it takes to be
            exact, which is shorter on a GPU.

    Raises:
        ValueError: A launcher has started ranks, and `processes` asks for others, or there is
            no such type of device.
        RuntimeError: There are fewer devices than ranks.
    """
    kind = device_type or present()
    if seconds is None:
        seconds = SECONDS if kind == "cpu" else SECONDS_BESIDE
    if kind not in (known := [row.type for row in DEVICES]):
        raise ValueError(f"there is no device {kind!r}; use one of {', '.join(known)}.")
    if belongs_to_a_group():
        if processes is not None:
            raise ValueError(
                f"a launcher has started {process_info().world_size} ranks, which are measured; "
                "leave out the number of processes."
            )
        start_process_group(kind)
        return _of_rank(kind, seconds)
    count = processes or (2 if kind == "cpu" else device_of(kind).count())
    own_device(kind, count - 1, count)
    if count > 1:
        return launch(_of_rank, kind, seconds, processes=count, device_type=kind)[0]
    alone = measured_device(own_device(kind, 0, 1), 1, seconds)
    memory = Link(alone.bandwidth, alone.per_call)  # it has no other link
    return Cluster(alone, 1, 1, memory, memory)


def _of_rank(kind: str, seconds: float) -> Cluster:
    info = process_info()
    per_node, world = info.local_world_size, info.world_size
    device = own_device(kind, info.local_rank, per_node)
    dist.barrier()
    own = measured_device(device, per_node, seconds)
    everyone: list[Device] = [own] * world
    dist.all_gather_object(everyone, own)
    links = measured_links(_groups(world, per_node), kind)
    near, far = (_link(links, size) for size in (per_node if per_node > 1 else world, world))
    return Cluster(
        _middle(everyone), per_node, world // per_node, near, far, collectives=_as_lists(links)
    )


def _groups(world: int, per_node: int) -> list[int]:
    """Return sizes of groups that lie in a node, or fill nodes."""
    asked = {2, 4, 8, per_node, world}
    inside = [size for size in asked if 1 < size <= per_node and per_node % size == 0]
    return [
        *inside,
        *{size for size in (2 * per_node, world) if size > per_node and not world % size},
    ]


def _link(links: MeasuredLinks, ranks: int) -> Link:
    """Fit a link to the times of an all-to-all of the least and of the most bytes."""
    (few, first), *_, (many, last) = links.costs["all_to_all_single", ranks]
    least, most = first.busy + first.link, last.busy + last.link
    return Link((many - few) / max(most - least, 1e-9), least)


def _middle(found: Sequence[Device]) -> Device:
    first = found[0]

    def rates(of: Callable[[Device], Rates]) -> Rates:
        names = set.intersection(*({*of(each)} for each in found))
        return {
            name: median(of(each)[name] for each in found) for name in of(first) if name in names
        }

    return replace(
        first,
        memory=min(each.memory for each in found),
        flops=rates(lambda each: each.flops),
        bandwidth=median(each.bandwidth for each in found),
        per_call=median(each.per_call for each in found),
        per_operator=median(each.per_operator for each in found),
        per_step=median(each.per_step for each in found),
        workspaces=rates(lambda each: each.workspaces),
        workspace=max(each.workspace for each in found),
        kernels={name: rates(lambda each, name=name: each.kernels[name]) for name in first.kernels},
        bandwidths=[
            (same[0][0], median(rate for _, rate in same))
            for same in zip(*(each.bandwidths for each in found), strict=True)
        ],
    )


def _as_lists(links: MeasuredLinks) -> list[Measured]:
    return [
        (name, ranks, [(sent, cost.busy, cost.link) for sent, cost in points])
        for (name, ranks), points in links.costs.items()
    ]


def table_of_rates(found: Cluster) -> str:
    """Return tables of the rates of kernels and of the times of collectives, as text."""
    ranks = f"{found.devices} ranks" if found.devices > 1 else "1 rank"
    lines = [f"{ranks} of {found.device.name}, {found.device.source}", ""]
    lines += aligned([["10⁹ operations/s", *SHOWN], *_kernels(found.device)], numbers=True)
    sizes = found.device.bandwidths
    by_size = [
        ["bytes of a kernel", *(_bytes(size) for size, _ in sizes)],
        ["GB/s", *(f"{rate / GB:.3g}" for _, rate in sizes)],
    ]
    lines += ["", *aligned(by_size, numbers=True)]
    lines += ["", f"A kernel takes {found.device.per_call * 1e6:.3g} µs at least."]
    of_host = [f"{n * 1e6:.3g} µs" for n in (found.device.per_operator, found.device.per_step)]
    lines += [f"The host takes {of_host[0]} for each operator, and {of_host[1]} for each step."]
    if found.collectives:
        lines += ["", *_collectives(found)]
    return "\n".join(lines)


def _kernels(device: Device) -> list[list[str]]:
    rates = {"product of matrices": device.flops} | device.kernels
    return [
        [name.replace("_", " "), *(f"{of[d] / GB:.3g}" if d in of else "" for d in SHOWN)]
        for name, of in rates.items()
    ]


def _collectives(found: Cluster) -> list[str]:
    sizes = [size for size, *_ in found.collectives[0][2]]
    rows = [
        [f"{name.removesuffix('_single')} of {ranks}",
         *(f"{1e3 * (busy + link):.3g}" for _, busy, link in costs)]
        for name, ranks, costs in found.collectives
    ]  # fmt: skip
    return aligned([["ms, of bytes sent", *map(_bytes, sizes)], *rows], numbers=True)


def _bytes(size: int) -> str:
    for name, unit in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= unit:
            return f"{size / unit:.0f} {name}"
    return f"{size} B"


def aligned(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Give the rows as lines, whose columns are two spaces apart.

    Args:
        rows: The head first.
        numbers: True if all columns but the first are aligned on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if numbers and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
