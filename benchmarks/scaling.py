"""Predicted scaling of training steps on a cluster, beside two other ways to split a field.

    python -m benchmarks.scaling --cluster 64x8xH100 --output outputs/scaling
    python -m benchmarks.scaling --cluster 8x8xH100 --best "U-Net 512³"

Nothing is measured: a rank of each mesh is traced alone, on tensors without numbers, and its
timeline is replayed against the rates of data sheets (`plan --cluster`). Strong scaling splits one
field over more and more ranks, weak scaling gives each rank a slab of the same rows. Each number of
ranks shares one sample, in slabs, pencils and blocks (splits along one, two and three dims).

The other ways are reckoned from the same steps, with the same compute:

- "transposed": a spectral layer transposes the half spectrum of the whole field before and after
  the transform of the split dim, in forward and in backward (benchmarks/transposed_fft.py).
- "whole field": each rank of a domain gathers the field of a spectral layer and transforms all of
  it; parameters, gradients and the optimizer's states are copied to each rank of a domain. So does
  PhysicsNeMo's ShardTensor with FSDP over data replicas.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from neuralop.models import TFNO
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.common import table
from benchmarks.networks import Task, UNet
from lightning_shard import Cluster, best, predict, read_cluster

UNet3d = partial(UNet, given=1, conv=nn.Conv3d)
Mesh = tuple[int, ...]
Point = dict[str, Any]
RANKS = (8, 32, 128, 512)
GIB = 2**30
HALF_OF_COMPLEX = 4  # bytes of a half spectrum for each real number of the field
FEW = 0.1  # of the computation that exchange may take


@dataclass(frozen=True)
class Workload:
    """A network and its field.

    Attributes:
        make: Makes the network.
        extents: Of the field.
        channels: Of the hidden layers.
        spectral_layers: That transform a field of these channels; 0: it has none.
    """

    make: Callable[[], nn.Module]
    extents: tuple[int, ...]
    channels: int
    spectral_layers: int = 0

    def task(self) -> Task:
        torch.manual_seed(0)
        return Task(self.make())

    def data(self, extents: Sequence[int] | None = None) -> DataLoader[Any]:
        """One sample, whose numbers are all the same one in memory."""
        sample: Any = [torch.zeros(()).expand(1, 1, *(extents or self.extents))]
        return DataLoader(sample, batch_size=None)


def _tfno(modes: tuple[int, ...], channels: int) -> Callable[[], nn.Module]:
    return lambda: TFNO(modes, 1, 1, channels, n_layers=4, factorization="tucker", rank=0.1)


WORKLOADS: dict[str, Workload] = {
    "TFNO 2048²": Workload(_tfno((64, 64), 64), (2048, 2048), 64, 4),
    "TFNO 1024³": Workload(_tfno((32, 32, 32), 32), (1024, 1024, 1024), 32, 4),
    "U-Net 512³": Workload(lambda: UNet3d(16), (512, 512, 512), 16),
}


def domains(ranks: int, extents: Sequence[int]) -> Iterator[Mesh]:
    """Slabs, pencils and blocks, each as near to equal sizes as powers of two allow."""
    for dims in range(1, len(extents) + 1):
        parts = [1] * dims
        while math.prod(parts) < ranks:
            parts[min(range(dims), key=lambda d: parts[d])] *= 2
        enough = all(p <= extent for p, extent in zip(parts, extents, strict=False))
        if enough and (dims == 1 or min(parts) > 1):
            yield tuple(parts)


def point(workload: Workload, extents: Sequence[int], domain: Mesh, cluster: Cluster) -> Point:
    """What a step takes of one sample on one domain."""
    used = part_of(cluster, math.prod(domain))
    found = predict(workload.task(), workload.data(extents), (1, *domain), used)
    return {
        "domain": list(domain), "extents": list(extents), "seconds": found.seconds,
        "compute": found.compute, "exchange": found.exchange,
        "parameters": found.parameters_traffic, "memory": found.memory,
    }  # fmt: skip


def part_of(cluster: Cluster, ranks: int) -> Cluster:
    """The first nodes of a cluster, with so many devices."""
    per_node = min(ranks, cluster.per_node)
    return Cluster(cluster.device, per_node, ranks // per_node, cluster.inside, cluster.between)


def others(workload: Workload, ours: Point, cluster: Cluster) -> dict[str, Point]:
    """What the other ways take where ours takes the best time."""
    ranks, device = math.prod(ours["domain"]), cluster.device
    link = cluster.link(ranks)
    spectra = math.prod(ours["extents"]) * workload.channels * HALF_OF_COMPLEX
    kept = sum(p.nbytes for p in workload.make().parameters())
    layers, away = workload.spectral_layers, (ranks - 1) / ranks
    transposes = layers * 4 * (spectra / ranks * away / link.bandwidth + link.latency)
    gathers = layers * 2 * (spectra * away / link.bandwidth + link.latency)
    passes = layers * 8 * len(ours["extents"]) * spectra * away / device.bandwidth
    rest = ours["seconds"] - (ours["exchange"] if layers else 0.0)
    field = spectra * 2 if layers and ranks > 1 else 0
    return {
        "transposed": {"seconds": rest + transposes, "memory": ours["memory"]},
        "whole field": {
            "seconds": rest + gathers + passes,
            "memory": ours["memory"] + 4 * kept * away + field,
        },
    }


def strong(workload: Workload, cluster: Cluster, ranks: Sequence[int]) -> list[Point]:
    """One field on more and more ranks."""
    return [
        point(workload, workload.extents, domain, cluster)
        for count in ranks
        for domain in domains(count, workload.extents)
    ]


def weak(workload: Workload, cluster: Cluster, ranks: Sequence[int], first: int) -> list[Point]:
    """Slabs of the same rows on each rank: those of the whole field on `first` ranks."""
    rows, *rest = workload.extents
    return [point(workload, (rows * count // first, *rest), (count,), cluster) for count in ranks]


def fastest(points: Sequence[Point], ranks: int) -> Point:
    """Of the domains of so many ranks."""
    mine = [p for p in points if math.prod(p["domain"]) == ranks]
    return min(mine, key=lambda p: p["seconds"])


def smallest_slab(points: Sequence[Point]) -> Point | None:
    """The thinnest slab up to which waiting for fields takes a tenth of the computation at most."""
    slabs = sorted((p for p in points if len(p["domain"]) == 1), key=lambda p: p["domain"][0])
    enough = [*takewhile(lambda p: p["exchange"] <= FEW * p["compute"], slabs)]
    return enough[-1] if enough else None


def report(found: dict[str, dict[str, list[Point]]], cluster: Cluster) -> None:
    """Print what is in the page."""
    for name, each in found.items():
        print(f"\n{name}, one sample on {cluster}, seconds of a step (GiB)\n")
        rows = [_row(name, each["strong"], n, cluster) for n in counts(each["strong"])]
        table(["ranks", "fastest split", "slabs", "pencils", "blocks", "exchange",
               "transposed FFT", "whole field"], rows)  # fmt: skip
        if slab := smallest_slab(each["strong"]):
            thin = slab["extents"][0] // slab["domain"][0]
            print(f"\nSlabs of {thin} rows or more wait for fields less than 10 % of computing.")


def counts(points: Sequence[Point]) -> list[int]:
    """The numbers of ranks."""
    return sorted({math.prod(p["domain"]) for p in points})


def _row(name: str, points: Sequence[Point], ranks: int, cluster: Cluster) -> list[str]:
    first = fastest(points, ranks)
    mine = {len(p["domain"]): p for p in points if math.prod(p["domain"]) == ranks}
    beside = others(WORKLOADS[name], first, cluster)
    return [
        str(ranks), "x".join(map(str, first["domain"])),
        *(_cell(mine.get(dims)) for dims in (1, 2, 3)),
        f"{first['exchange'] / first['seconds']:.0%}",
        *map(_cell, beside.values()),
    ]  # fmt: skip


def _cell(p: Point | None) -> str:
    return "" if p is None else f"{p['seconds']:.3g} ({p['memory'] / GIB:.1f})"


def draw(found: dict[str, dict[str, list[Point]]], cluster: Cluster, folder: Path) -> None:
    """Strong and weak scaling of all networks."""
    for kind in ("strong", "weak"):
        figure = Figure(figsize=(4.2 * len(found), 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        for place, (name, each) in enumerate(found.items()):
            axes: Any = figure.add_subplot(1, len(found), place + 1)
            _lines(axes, name, each[kind], cluster, ideal=kind == "strong")
            axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds of a step",
                     title=name)  # fmt: skip
            ranks = counts(each[kind])
            axes.set_xticks(ranks, labels=[str(n) for n in ranks], minor=False)
            axes.minorticks_off()
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, high / 8), high * 1.3)  # a power of ten has its tick
            axes.grid(visible=True, alpha=0.3)
            axes.legend(fontsize=8)
        figure.savefig(folder / f"scaling_{kind}.png", dpi=100)


def _lines(axes: Any, name: str, points: list[Point], cluster: Cluster, *, ideal: bool) -> None:
    ranks = counts(points)
    ours = [fastest(points, n) for n in ranks]
    axes.plot(ranks, [p["seconds"] for p in ours], "o-", label="lightning_shard")
    if WORKLOADS[name].spectral_layers:
        for way, marker in (("transposed", "s--"), ("whole field", "^:")):
            beside = [others(WORKLOADS[name], p, cluster)[way]["seconds"] for p in ours]
            axes.plot(ranks, beside, marker, label=way, markersize=4)
    first = ours[0]["seconds"]
    line = [first * ranks[0] / n for n in ranks] if ideal else [first for _ in ranks]
    axes.plot(ranks, line, color="gray", linewidth=1, label="ideal")


def main() -> None:
    """Predict, print tables, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", type=read_cluster, default=read_cluster("64x8xH100"))
    parser.add_argument("--networks", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--first", type=int, default=8, help="ranks of the first slab, weakly")
    parser.add_argument("--output", type=Path, default=Path("outputs/scaling"))
    parser.add_argument("--report", action="store_true", help="predict nothing")
    parser.add_argument("--best", choices=WORKLOADS, help="rank the meshes of the cluster instead")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.best:
        workload = WORKLOADS[options.best]
        ranking = best(workload.task(), workload.data(), options.cluster)
        ranking.save(options.output)
        print(ranking)
        return
    file = options.output / "scaling.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for name in () if options.report else options.networks:
        workload = WORKLOADS[name]
        found[name] = {
            "strong": strong(workload, options.cluster, options.ranks),
            "weak": weak(workload, options.cluster, options.ranks, options.first),
        }
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    report(found, options.cluster)
    draw(found, options.cluster, options.output)


if __name__ == "__main__":
    main()
