"""Describes the machines on which a run is predicted: devices, the links between them, clusters.

A machine that was measured is read from the file that `calibrate` writes; clusters.py knows others.
Nothing here imports torch, so that the command line reads a cluster at once.
"""

import json
import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path

GB = 1e9
PCIE_4 = 25 * GB  # in practice: about three quarters of its data sheet
PAGEABLE = 7 * GB  # from memory of the host that is not pinned, to an H100
MOST_DEVICES = 16_384  # to predict a step of so many takes about a minute
OF_ONE_CARD = "measured on one card"
RUN_HERE = "each kernel of the step was run and timed"
OF_DATA_SHEETS = "from data sheets, scaled by a measured H100"
HOW_NEAR = (
    "Steps on an H100 took 0.2 to 2.6 times as long as by such rates; "
    "measure on a device is nearer."
)
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

Rates = dict[str, float]  # by dtype
# a collective, its number of ranks, and by growing bytes that a rank sends both times of a `Cost`
Measured = tuple[str, int, list[tuple[int, float, float]]]


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

    bandwidth: float
    latency: float


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
        kernels: The same rates as `flops` for kinds of kernels that were measured, such as
            "convolution"; bytes a second where a kernel's time goes by its bytes, such as
            "group_norm". The names are those of `kernel_calls.KERNELS`.
        bandwidths: Pairs of bytes that a kernel reads and writes, and bytes a second, by growing
            bytes: small tensors lie in caches.
        host_rate: Bytes a second each way between its memory and pinned memory of the host.
        batch_rate: Bytes a second of a batch that comes to it, from memory that is not pinned.
        is_beside_host: True if it computes while the host does something else, as a GPU does.
        per_operator: Seconds of the host for each operator, a training step's Python included.
        per_step: Seconds of the host for a step beside its operators: those of the Trainer's loop.
        workspaces: Bytes that a convolution takes besides, for each byte that it reads and writes,
            by type of number.
        workspace: Bytes that the library of products keeps after its first call.
    """

    name: str
    memory: int
    flops: Rates
    bandwidth: float
    per_call: float
    source: str
    kernels: dict[str, Rates] = field(default_factory=dict[str, Rates])
    bandwidths: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    host_rate: float = PCIE_4
    batch_rate: float = PAGEABLE
    is_beside_host: bool = False
    per_operator: float = 0.0
    per_step: float = 0.0
    workspaces: Rates = field(default_factory=dict[str, float])
    workspace: int = 0

    def flops_of(self, kernels: Sequence[str], dtype: str) -> float:
        """Return the operations a second of the first kind of kernel that is known.

        Of dense products if none is, and in float32 if the type of number is not known.
        """
        for rates in (*(self.kernels.get(kernel, {}) for kernel in kernels), self.flops):
            if dtype in rates:
                return rates[dtype]
        return self.flops["float32"]

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
    per_node: int
    nodes: int
    inside: Link
    between: Link
    price: float | None = None
    collectives: list[Measured] = field(default_factory=list[Measured])

    @property
    def devices(self) -> int:
        """The number of devices of all nodes."""
        return self.per_node * self.nodes

    @property
    def origin(self) -> str:
        """A sentence on where the rates come from."""
        if self.device.source.startswith(RUN_HERE):
            links = "measured" if self.collectives else "data sheets"
            return f"On {self.device.name} {self.device.source}; the rates of its links: {links}."
        rates = f"The rates of {self.device.name}"
        if self.device.source.startswith((OF_DATA_SHEETS, OF_ONE_CARD)):
            return f"{rates}: {self.device.source}; those of its links: data sheets. {HOW_NEAR}"
        return f"{rates} and its links: {self.device.source}."

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
