"""Describes the machines on which a run is predicted: devices, the links between them, clusters.

The rates of known devices and links are those of their makers' data sheets, which a real program
does not reach. A machine that was measured is read from the file that `calibrate` writes. Nothing
here imports torch, so that the command line reads a cluster at once.
"""

import json
import math
import re
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from lightning_shard.lab.machine_file import Must, is_number, is_text, is_whole, read_as
from lightning_shard.processes.nearest import nearest

GB = 1e9
MOST_DEVICES = 16_384  # of which one step takes about a minute to predict
DATA_SHEET = "data sheet: "
_SIZES = re.compile(r"(?:(\d+)x)?(\d+)x([a-z][^:]*)(?::(.+))?", re.IGNORECASE)
_IN_ROUNDS = (
    "all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single", "all_reduce",
    "mean_of_gradients",
    "broadcast",
)  # fmt: skip
_MEASURED_AS = {  # the collective that is measured, for each other one that is called
    "all_to_all": "all_to_all_single",
    "all_gather": "all_gather_single",
    "reduce_scatter": "reduce_scatter_single",
    "broadcast": "all_reduce",
    "reduce": "all_reduce",
    "barrier": "all_reduce",
    "mean_of_gradients": "all_reduce",
    "send": "all_to_all_single",
    "recv": "all_to_all_single",
    "scatter": "all_to_all_single",
    "gather": "all_gather_single",
}


def _growing(least: int) -> Must:
    def test(rows: Any) -> bool:
        return len(rows) >= least and all(one[0] < next_[0] for one, next_ in pairwise(rows))

    return Must(f"have {least} sizes or more, each larger than the last", test)


def _one_of(*names: str) -> Must:
    return Must(f"be one of {', '.join(names)}", lambda x: x in names)


_ABOVE_0 = Must("be a number above 0", lambda x: is_number(x) and x > 0)
_PRICE = Must("be a number above 0, or null", lambda x: x is None or _ABOVE_0.test(x))
_COUNT = Must(
    f"be a whole number from 1 to {MOST_DEVICES}", lambda x: is_whole(x) and 1 <= x <= MOST_DEVICES
)
Text = Annotated[str, Must("be a short text", is_text)]
Rate = Annotated[float, _ABOVE_0]
Seconds = Annotated[float, Must("be a number from 0 on", is_number)]
Bytes = Annotated[int, Must("be a whole number from 0 on", is_whole)]
Count = Annotated[int, _COUNT]
Dtype = Annotated[str, _one_of("float64", "float32", "tf32", "bfloat16", "float16")]
Kernel = Annotated[
    str,
    _one_of(
        "convolution", "convolution_backward", "thin_convolution", "thin_convolution_backward",
        "fft",
    ),
]  # fmt: skip
Rates = dict[Dtype, Rate]
# a collective, its number of ranks, and by growing bytes that a rank sends both times of a `Cost`
Measured = tuple[Text, Count, Annotated[list[tuple[Bytes, Seconds, Seconds]], _growing(2)]]


@dataclass(frozen=True)
class Collective:
    """One rank's part in a collective.

    Attributes:
        name: Its name in torch.distributed, such as "all_reduce".
        members: The ranks of its group.
        sent: The number of bytes that this rank sends.
    """

    name: str
    members: tuple[int, ...]
    sent: int


@dataclass(frozen=True)
class Cost:
    """The time that one collective takes on a link.

    Attributes:
        busy: Seconds in which the rank itself works for it, and computes nothing.
        link: Seconds in which the link is taken, while ranks may compute.
    """

    busy: float
    link: float


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of one group.

    Attributes:
        bandwidth: Bytes a second that one rank sends, while it receives as many.
        latency: Seconds that a collective of few bytes takes.
    """

    bandwidth: Rate
    latency: Seconds


@dataclass(frozen=True)
class Device:
    """The device on which one rank computes.

    Attributes:
        name: The name by which it is known.
        memory: Its memory in bytes.
        flops: Floating-point operations a second on dense tensors, by type of number: "float64",
            "float32", "tf32", "bfloat16", "float16". "float32" must be there.
        bandwidth: Bytes a second of its memory.
        per_call: Seconds that a kernel takes at least.
        source: The data sheet of these numbers, or the way in which they were measured.
        kernels: The same rates as `flops` for kinds of kernels that were measured: "fft",
            "convolution" and "convolution_backward", and "thin_" before these two where channels
            are few.
        bandwidths: Pairs of bytes that a kernel reads and writes, and bytes a second, by growing
            bytes: small tensors lie in caches.
    """

    name: Text
    memory: Bytes
    flops: Rates
    bandwidth: Rate
    per_call: Rate
    source: Text
    kernels: dict[Kernel, Rates] = field(default_factory=dict[str, Rates])
    bandwidths: Annotated[list[tuple[Annotated[int, _ABOVE_0], Rate]], _growing(0)] = field(
        default_factory=list[tuple[int, float]]
    )

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ValueError("device.flops.float32 is missing")

    def flops_of(self, kernel: str, dtype: str) -> float:
        """Return the operations a second of a kind of kernel; of dense products if unknown."""
        dense = self.flops.get(dtype, self.flops["float32"])
        return self.kernels.get(kernel, {}).get(dtype, dense)

    def bandwidth_of(self, moved: float) -> float:
        """Return the bytes a second of a kernel that reads and writes `moved` bytes."""
        if not self.bandwidths:
            return self.bandwidth
        place = bisect(self.bandwidths, moved, key=itemgetter(0))
        if place in (0, len(self.bandwidths)):
            return self.bandwidths[min(place, len(self.bandwidths) - 1)][1]
        (low, first), (high, last) = self.bandwidths[place - 1 : place + 1]
        return first + (last - first) * math.log(moved / low) / math.log(high / low)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices; `read_cluster` and `calibrate` make one.

    Attributes:
        device: The device of each rank.
        per_node: The number of devices in a node.
        nodes: The number of nodes.
        inside: The link within a node.
        between: The link between nodes, for each device when all of a node send.
        price: The price of one device for an hour, in any currency; None if unknown.
        collectives: Measured times of collectives: the name, the number of ranks, and for growing
            bytes that a rank sends the seconds in which it works for that, and in which the link
            does.
    """

    device: Device
    per_node: Count
    nodes: Count
    inside: Link
    between: Link
    price: Annotated[float | None, _PRICE] = None
    collectives: list[Measured] = field(default_factory=list[Measured])

    @property
    def devices(self) -> int:
        """The number of devices of all nodes."""
        return self.per_node * self.nodes

    @property
    def origin(self) -> str:
        """A sentence on where the rates come from."""
        if not self.device.source.startswith(DATA_SHEET):
            return f"The rates of {self.device.name} and its links: {self.device.source}."
        return f"The rates of {self.device.name} and its links are from data sheets, not measured."

    def link(self, ranks: int) -> Link:
        """Return the slowest link among neighbouring ranks.

        Args:
            ranks: The number of ranks from the first of the group to its last, both counted.
        """
        return self.inside if ranks <= self.per_node else self.between

    def cost(self, collective: Collective) -> Cost:
        """Return the time of a collective; the ranks are numbered node by node.

        A collective that was measured takes what it took among ranks of one node, or of several.
        Another one takes its bytes at the rate of the slowest link among its ranks, and latencies.
        """
        members = collective.members
        if len(members) == 1:
            return Cost(0.0, 0.0)
        ranks = max(members) - min(members) + 1
        measured = {
            (name, size): [(sent, Cost(busy, link)) for sent, busy, link in points]
            for name, size, points in self.collectives
            if (size <= self.per_node) == (ranks <= self.per_node)
        }
        if (found := MeasuredLinks(measured)).knows(collective.name):
            return found.cost(collective)
        link = self.link(ranks)
        rounds = math.ceil(math.log2(len(members))) if collective.name in _IN_ROUNDS else 1
        return Cost(0.0, rounds * link.latency + collective.sent / link.bandwidth)

    def save(self, path: str | Path) -> None:
        """Write a file that `read_cluster` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        text = f"{self.nodes}x{self.per_node}x{self.device.name} ({self.device.source})"
        return text if self.price is None else f"{text}, {self.price:g} per device and hour"


@dataclass(frozen=True)
class MeasuredLinks:
    """Measured times of collectives.

    Attributes:
        costs: By name and number of ranks, pairs of bytes sent and the cost, by growing bytes.
    """

    costs: dict[tuple[str, int], list[tuple[int, Cost]]]

    def knows(self, name: str) -> bool:
        """Return whether a collective like that of this name was measured."""
        return any(kind == _MEASURED_AS.get(name, name) for kind, _ in self.costs)

    def cost(self, collective: Collective) -> Cost:
        """Return the time of a collective, interpolated between the sizes that were measured."""
        ranks = len(collective.members)
        if ranks == 1:
            return Cost(0.0, 0.0)
        name = _MEASURED_AS.get(collective.name, collective.name)
        sizes = [known for kind, known in self.costs if kind == name]
        points = self.costs[name, min(sizes, key=lambda known: abs(math.log(known / ranks)))]
        return _between(points, collective.sent)


def _between(points: Sequence[tuple[int, Cost]], sent: int) -> Cost:
    place = min(max(1, bisect(points, sent, key=itemgetter(0))), len(points) - 1)
    (low, first), (high, last) = points[place - 1 : place + 1]
    part = max(0.0, (sent - low) / (high - low))
    return Cost(
        first.busy + part * (last.busy - first.busy), first.link + part * (last.link - first.link)
    )


def _device(
    name: str,
    memory: float,
    teraflops: tuple[float, float, float, float],
    bandwidth: float,
    source: str,
) -> Device:
    """Make a device of memory in GB, bandwidth in GB/s, and rates of float64, 32, tf32, 16 bits."""
    rates = dict(zip(("float64", "float32", "tf32", "bfloat16"), teraflops, strict=True))
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items()}
    flops["float16"] = flops["bfloat16"]
    return Device(name, int(memory * GB), flops, bandwidth * GB, 5e-6, f"{DATA_SHEET}{source}")


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

# Bytes a second in one direction, from data sheets. No maker gives latencies: these are usual times
# of small collectives of NCCL, RCCL and gloo.
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
    """Read a cluster from a few letters, or from the file of a machine that was measured.

    Args:
        text: Nodes, devices of a node and their kind, such as `8x8xH100`, or `4xA100` for one
            node. After a colon other links between nodes, `8x8xH100:HDR`, or within a node and
            between them, `8x8xH100:PCIe5/Ethernet100`. Or the name of a `.json` file that
            `calibrate` wrote.
        price: The price of one device for an hour.

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
    """Return the known name that is equal but for its case."""
    lower = {each.lower(): each for each in names}
    if name.strip().lower() in lower:
        found = lower[name.strip().lower()]
        return _SAME.get(found, found)
    close = nearest(name, names, "") or f"; known are {', '.join(names)}."
    raise ValueError(f"'{name}' is no known {kind}{close}")


def _from_file(path: Path, price: float | None) -> Cluster:
    cluster = read_as(Cluster, path)
    if cluster.devices > MOST_DEVICES:
        raise ValueError(
            f"'{path}' has {cluster.devices} devices, and {MOST_DEVICES} are the most."
        )
    return cluster if price is None else replace(cluster, price=price)
