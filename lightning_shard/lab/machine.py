"""Describes the machines on which a run is predicted: devices, the links between them, clusters.

The rates of known devices and links are those of their makers' data sheets, which a real program
does not reach. A machine that was measured is read from the file that `calibrate` writes.
"""

import json
import math
import re
from bisect import bisect
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning_shard.lab.machine_file import MOST_DEVICES, read_machine

GB = 1e9

Rates = dict[str, float]  # by type of number, such as "float32"
Measured = tuple[str, int, list[tuple[int, float, float]]]
_SIZES = re.compile(r"(?:(\d+)x)?(\d+)x([a-z][^:]*)(?::(.+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """What connects the ranks of one group.

    Attributes:
        bandwidth: Bytes a second that one rank sends, while it receives as many.
        latency: Seconds of one collective of few bytes.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """What computes for one rank.

    Attributes:
        name: By which it is known.
        memory: Bytes.
        flops: Floating-point operations a second on dense tensors: "float64", "float32", "tf32",
            "bfloat16", "float16".
        bandwidth: Bytes a second of its memory.
        per_call: Seconds that a kernel takes at least.
        source: The name of a data sheet, or where it was measured.
        kernels: As `flops`, of kinds of kernels that were measured: "fft", "convolution" and
            "convolution_backward", and "thin_" before these two where channels are few.
        bandwidths: Pairs of bytes that a kernel reads and writes, and bytes a second, by growing
            bytes: small tensors lie in caches.
    """

    name: str
    memory: int
    flops: Rates
    bandwidth: float
    per_call: float
    source: str
    kernels: dict[str, Rates] = field(default_factory=dict[str, Rates])
    bandwidths: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])

    def flops_of(self, kernel: str, dtype: str) -> float:
        """Operations a second of a kind of kernel, of dense products where it is not known."""
        dense = self.flops.get(dtype, self.flops["float32"])
        return self.kernels.get(kernel, {}).get(dtype, dense)

    def bandwidth_of(self, moved: float) -> float:
        """Bytes a second of a kernel that reads and writes so many."""
        if not self.bandwidths:
            return self.bandwidth
        place = bisect(self.bandwidths, moved, key=lambda pair: pair[0])
        if place in (0, len(self.bandwidths)):
            return self.bandwidths[min(place, len(self.bandwidths) - 1)][1]
        (low, first), (high, last) = self.bandwidths[place - 1 : place + 1]
        return first + (last - first) * math.log(moved / low) / math.log(high / low)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
        device: Of each rank.
        per_node: Devices of a node.
        nodes: How many.
        inside: The link within a node.
        between: The link between nodes, for each device when all of a node send.
        price: Of one device for an hour, in any currency; None: unknown.
        collectives: What was measured of them: the name, how many ranks, and for growing bytes that
            a rank sends the seconds in which it works for that, and in which the link does.
    """

    device: Device
    per_node: int
    nodes: int
    inside: Link
    between: Link
    price: float | None = None
    collectives: list[Measured] = field(default_factory=list[Measured])

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.per_node * self.nodes

    def link(self, ranks: int) -> Link:
        """The link of a group of neighbouring ranks, the slowest on the way.

        Args:
            ranks: From the first of the group to its last, both counted.
        """
        return self.inside if ranks <= self.per_node else self.between

    def save(self, path: str | Path) -> None:
        """Write a file that `read_cluster` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        text = f"{self.nodes}x{self.per_node}x{self.device.name} ({self.device.source})"
        return text if self.price is None else f"{text}, {self.price:g} per device and hour"


def _device(
    name: str,
    memory: float,
    teraflops: tuple[float, float, float, float],
    bandwidth: float,
    source: str,
) -> Device:
    """Memory in GB, bandwidth in GB/s; float64, float32, tf32, and 16 bits."""
    rates = dict(zip(("float64", "float32", "tf32", "bfloat16"), teraflops, strict=True))
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items()}
    flops["float16"] = flops["bfloat16"]
    return Device(name, int(memory * GB), flops, bandwidth * GB, 5e-6, f"data sheet: {source}")


# Without sparsity. What a package of two offers is halved where each half is a device of torch.
DEVICES: dict[str, Device] = {
    row.name: row
    for row in (
        _device("A100-40", 40, (19.5, 19.5, 156, 312), 1555, "NVIDIA A100 40GB SXM"),
        _device("A100-80", 80, (19.5, 19.5, 156, 312), 2039, "NVIDIA A100 80GB SXM"),
        _device("H100", 80, (67, 67, 494.5, 989), 3350, "NVIDIA H100 SXM"),
        _device("H200", 141, (67, 67, 494.5, 989), 4800, "NVIDIA H200 SXM"),
        _device("MI250X", 64, (47.9, 47.9, 47.9, 191.5), 1638, "AMD Instinct MI250X, one GCD"),
        _device(
            "Max1550", 64, (26, 26, 209, 419), 1638, "Intel Data Center GPU Max 1550, one stack"
        ),
    )
}
_SAME = {"A100": "A100-80", "H100-SXM": "H100", "H100-80": "H100", "MI250": "MI250X"}

# Bytes a second in one direction, of a data sheet. Latencies are no maker's: they are what small
# collectives of NCCL, RCCL and gloo usually take.
LINKS: dict[str, Link] = {
    "NVLink3": Link(300 * GB, 15e-6),  # 12 links of 25 GB/s
    "NVLink4": Link(450 * GB, 15e-6),  # 18 links of 25 GB/s
    "PCIe4": Link(32 * GB, 20e-6),  # 16 lanes
    "PCIe5": Link(64 * GB, 20e-6),
    "InfinityFabric": Link(50 * GB, 20e-6),  # one link of 16 bits, between two packages
    "XeLink": Link(26.5 * GB, 20e-6),  # one link
    "HDR": Link(25 * GB, 25e-6),  # InfiniBand, 200 Gb/s
    "NDR": Link(50 * GB, 25e-6),  # InfiniBand, 400 Gb/s
    "Slingshot": Link(25 * GB, 30e-6),  # 200 Gb/s
    "Ethernet10": Link(1.25 * GB, 60e-6),
    "Ethernet25": Link(3.125 * GB, 60e-6),
    "Ethernet100": Link(12.5 * GB, 60e-6),
}
# Within a node, and between nodes with the network cards that each device has to itself: one in
# NVIDIA's DGX, half a card in Frontier, two thirds of one in Aurora.
_USUAL: dict[str, tuple[Link, str, float]] = {
    "A100-40": (LINKS["NVLink3"], "HDR", 1),
    "A100-80": (LINKS["NVLink3"], "HDR", 1),
    "H100": (LINKS["NVLink4"], "NDR", 1),
    "H200": (LINKS["NVLink4"], "NDR", 1),
    "MI250X": (LINKS["InfinityFabric"], "Slingshot", 1 / 2),
    "Max1550": (LINKS["XeLink"], "Slingshot", 2 / 3),
}


def read_cluster(text: str, price: float | None = None) -> Cluster:
    """Read what a cluster is.

    Args:
        text: Nodes, devices of a node and their kind, such as `8x8xH100`, or `4xA100` for one
            node. After a colon other links between nodes, `8x8xH100:HDR`, or within a node and
            between them, `8x8xH100:PCIe5/Ethernet100`. Or the name of a `.json` file that
            `calibrate` wrote.
        price: Of one device for an hour.

    Raises:
        ValueError: The text is no cluster, or the price is not positive.

    Example:
        >>> read_cluster("8x8xH100").devices
        64
    """
    if price is not None and not 0 < price < math.inf:
        raise ValueError(f"the price of a device and hour must be larger than 0; got {price:g}.")
    if text.endswith(".json"):
        return _from_file(Path(text), price)
    found = _SIZES.fullmatch(text.strip())
    if not found:
        raise ValueError(
            f"'{text}' is no cluster: nodes x devices of a node x kind of device, such as "
            "8x8xH100, or a .json file that calibrate wrote."
        )
    nodes, per_node = int(found[1] or 1), int(found[2])
    if not 0 < nodes * per_node <= MOST_DEVICES:
        raise ValueError(
            f"'{text}' has {nodes * per_node} devices; give at least one node and one device of "
            f"it, and {MOST_DEVICES} at most."
        )
    device = DEVICES[_SAME.get(found[3].upper(), _known("device", found[3], [*DEVICES, *_SAME]))]
    inside, between = _links(device.name, found[4])
    return Cluster(device, per_node, nodes, inside, between, price)


def _links(device: str, text: str | None) -> tuple[Link, Link]:
    inside, name, share = _USUAL[device]
    between = Link(LINKS[name].bandwidth * share, LINKS[name].latency)
    if text is None:
        return inside, between
    names = text.split("/")
    if len(names) > 2:
        raise ValueError(
            f"'{text}' names {len(names)} links; give the one between nodes, or the one within a "
            "node and the one between them, such as PCIe5/Ethernet100."
        )
    chosen = [LINKS[_known("link", each, LINKS)] for each in names]
    return (chosen[0] if len(chosen) == 2 else inside), chosen[-1]


def _known(kind: str, name: str, names: Iterable[str]) -> str:
    """The known name that is equal but for its case."""
    lower = {each.lower(): each for each in names}
    if name.strip().lower() in lower:
        found = lower[name.strip().lower()]
        return _SAME.get(found, found)
    close = get_close_matches(name.lower(), lower, 1, 0.6)
    hint = f"did you mean '{lower[close[0]]}'?" if close else f"known are {', '.join(names)}."
    raise ValueError(f"'{name}' is no known {kind}; {hint}")


def _from_file(path: Path, price: float | None) -> Cluster:
    given: dict[str, Any] = read_machine(path)
    inside, between = (Link(**given.pop(name)) for name in ("inside", "between"))
    device: dict[str, Any] = given.pop("device")
    device["bandwidths"] = [(size, rate) for size, rate in device.get("bandwidths", [])]
    measured = [
        (name, ranks, [(sent, busy, link) for sent, busy, link in costs])
        for name, ranks, costs in given.pop("collectives", [])
    ]
    cluster = Cluster(
        **given, device=Device(**device), inside=inside, between=between, collectives=measured
    )
    if cluster.devices > MOST_DEVICES:
        raise ValueError(
            f"'{path}' has {cluster.devices} devices, and {MOST_DEVICES} are the most."
        )
    return cluster if price is None else replace(cluster, price=price)
