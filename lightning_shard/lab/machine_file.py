"""Reads the file of a machine that `calibrate` wrote, and refuses another file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_shard.lab.machine import MOST_DEVICES, Cluster, Device, Link

LARGEST = 1e30  # the largest rate
LONGEST = 200  # the most characters of a text


def read_machine(path: Path) -> Cluster:
    """Read a machine from a JSON file.

    Raises:
        ValueError: There is no such file, or it holds something else; in one sentence.
    """
    if not path.is_file():
        raise ValueError(f"there is no file '{path}'; `calibrate` writes one of this machine.")
    try:
        found = _built(json.loads(path.read_text(encoding="utf-8")))
        _check(found)
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"'{path}' is no file that `calibrate` wrote ({ascii(str(error))[1:-1][:LONGEST]}); "
            "let it write a new one."
        ) from error
    return found


def _built(given: Any) -> Cluster:
    device, links = given["device"], {name: Link(**given[name]) for name in ("inside", "between")}
    sizes = [(size, rate) for size, rate in device.get("bandwidths", ())]
    measured = [
        (name, ranks, [(sent, busy, link) for sent, busy, link in points])
        for name, ranks, points in given.get("collectives", ())
    ]
    whole = Device(**{**device, "bandwidths": sizes})
    return Cluster(**{**given, **links, "device": whole, "collectives": measured})


def _check(cluster: Cluster) -> None:
    """Raise a ValueError for numbers and names that no machine has."""
    device, links = cluster.device, (cluster.inside, cluster.between)
    of_kernels = [rate for rates in device.kernels.values() for rate in rates.values()]
    rates = [device.bandwidth, device.per_call, *device.flops.values(), *of_kernels]
    rates += [device.host_rate, device.batch_rate, *(rate for _, rate in device.bandwidths)]
    rates += [*(link.bandwidth for link in links), cluster.price or 1, device.flops["float32"]]
    points = [point for _, _, each in cluster.collectives for point in each]
    times = [device.per_operator, device.per_step, device.workspace, *device.workspaces.values()]
    times += [*(link.latency for link in links), *(n for point in points for n in point)]
    counts = [cluster.nodes, cluster.per_node, *(ranks for _, ranks, _ in cluster.collectives)]
    names = [device.name, device.source, *device.flops, *device.kernels]
    names += [*device.workspaces]
    names += [name for name, _, _ in cluster.collectives]
    growing = [device.bandwidths, *(each for _, _, each in cluster.collectives)]
    for what, is_right in (
        ("a rate or a price", all(_is_number(rate) and rate > 0 for rate in rates)),
        ("a time or a number of bytes", all(map(_is_number, (*times, device.memory)))),
        ("a number of devices", all(type(n) is int and 0 < n <= MOST_DEVICES for n in counts)),
        ("a name", all(map(_is_text, names))),
        ("the order of sizes", all(map(_grows, growing))),
        ("a collective of one size", all(len(each) > 1 for _, _, each in cluster.collectives)),
    ):
        if not is_right:
            raise ValueError(f"{what} is none of a machine")


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and 0 <= x < LARGEST


def _is_text(x: Any) -> bool:
    return isinstance(x, str) and len(x) <= LONGEST and x.isprintable()


def _grows(rows: Iterable[Any]) -> bool:
    sizes = [row[0] for row in rows]
    return all(map(_is_number, sizes)) and sizes == sorted(set(sizes))
