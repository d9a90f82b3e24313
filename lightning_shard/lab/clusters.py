"""The clusters that a few letters name: kinds of devices, their links, files of measured machines.

One device is measured: the H100, by `calibrate`; its workspaces and the host's time of an operator
are fitted to measured steps (docs/devices.md). The rates of the others are those of their makers'
data sheets, times what the H100 reached of its own. Nothing here imports torch.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lightning_shard.lab.machine import (
    GB,
    MOST_DEVICES,
    OF_DATA_SHEETS,
    OF_ONE_CARD,
    PCIE_4,
    Cluster,
    Device,
    Link,
    Rates,
)
from lightning_shard.lab.machine_file import read_machine
from lightning_shard.processes.nearest import nearest

_SIZES = re.compile(r"(?:(\d+)x)?(\d+)x([a-z][^:]*)(?::(.+))?", re.IGNORECASE)
PCIE_5 = 2 * PCIE_4
_PCIE_5 = ("H100", "H200", "Max1550")
_MEASURED = Path(__file__).parent / "machines" / "H100.json"

# Without sparsity: memory in GB, rates of float64, float32, tf32 and 16 bits in 10^12 a second, and
# the bandwidth of memory in GB/s. A package of two is halved where each half is a device of torch.
_SHEETS: dict[str, tuple[str, float, tuple[float, float, float, float], float]] = {
    "A100-40": ("NVIDIA A100 40GB SXM", 40, (19.5, 19.5, 156, 312), 1555),
    "A100-80": ("NVIDIA A100 80GB SXM", 80, (19.5, 19.5, 156, 312), 2039),
    "H100": ("NVIDIA H100 SXM", 80, (67, 67, 494.5, 989), 3350),
    "H200": ("NVIDIA H200 SXM", 141, (67, 67, 494.5, 989), 4800),
    "MI250X": ("AMD Instinct MI250X, one GCD", 64, (47.9, 47.9, 47.9, 191.5), 1638),
    "Max1550": ("Intel Data Center GPU Max 1550, one stack", 64, (26, 26, 209, 419), 1638),
}


def _of_sheet(name: str) -> Rates:
    rates = dict(zip(("float64", "float32", "tf32", "bfloat16"), _SHEETS[name][2], strict=True))
    return {dtype: 1e12 * rate for dtype, rate in (rates | {"float16": rates["bfloat16"]}).items()}


def _measured() -> Device:
    """The H100, with the rate of TF32 that its rate of bfloat16 lets expect, if none is known."""
    found = read_machine(_MEASURED).device
    sheet = _of_sheet("H100")
    tf32 = sheet["tf32"] * found.flops["bfloat16"] / sheet["bfloat16"]
    source = f"{OF_ONE_CARD} {found.source.removeprefix('measured ')}"
    rates = {"tf32": tf32} | found.flops
    return replace(found, name="H100", flops=rates, source=source, host_rate=PCIE_5)


def _scaled(name: str, by: Device) -> Device:
    """A device of a data sheet, which reaches as much of it as the measured one of its own."""
    source, memory, _, bandwidth = _SHEETS[name]
    rates, sheet = _of_sheet(name), _of_sheet("H100")
    more = bandwidth / _SHEETS["H100"][3]

    def scaled(measured: Rates) -> Rates:
        return {dtype: rate * rates[dtype] / sheet[dtype] for dtype, rate in measured.items()}

    return replace(
        by,
        name=name,
        memory=int(memory * GB),
        flops=scaled(by.flops),
        bandwidth=by.bandwidth * more,
        source=f"{OF_DATA_SHEETS}: {source}",
        kernels={kernel: scaled(measured) for kernel, measured in by.kernels.items()},
        bandwidths=[(size, rate * more) for size, rate in by.bandwidths],
        host_rate=PCIE_5 if name in _PCIE_5 else PCIE_4,
    )


_H100 = _measured()
DEVICES: dict[str, Device] = {
    name: _H100 if name == "H100" else _scaled(name, _H100) for name in _SHEETS
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
    cluster = read_machine(path)
    if cluster.devices > MOST_DEVICES:
        raise ValueError(
            f"'{path}' has {cluster.devices} devices, and {MOST_DEVICES} are the most."
        )
    return cluster if price is None else replace(cluster, price=price)
