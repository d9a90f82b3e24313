"""One spectral convolution, forward and backward: ours, transposed FFTs, and neuraloperator's own.

    python -m benchmarks.spectral --quick

On one process ours is compared with the unmodified layer on a plain tensor; on several with the
transposed FFT (benchmarks/transposed_fft.py). Processor time, bytes and memory are those of the
rank that needs most; memory is beyond inputs and weights.
"""

import argparse
import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from neuralop.layers.spectral_convolution import SpectralConv
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lightning_shard
from benchmarks.common import MIB, Cost, describe, measured, start, table
from benchmarks.transposed_fft import spectral_conv
from lightning_shard.domain.layout import partition
from lightning_shard.memory.neuralop.layers import avoid_whole_fields

FIELDS = ((421, 421), (1024, 1024), (2048, 2048), (128, 128, 128))
HEADER = (
    "field, modes, width", "ranks", "compared with", "CPU s", "other CPU s", "faster",
    "faster by the clock", "MiB sent", "other MiB sent", "fewer bytes", "peak MiB",
    "other peak MiB",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layer of `width` channels in and out on one sample."""

    extents: tuple[int, ...]
    modes: int
    width: int

    def __str__(self) -> str:
        square = f"{self.extents[0]}{'²' if len(self.extents) == 2 else '³'}"
        return f"{square}, {self.modes}, {self.width}"

    @property
    def field_bytes(self) -> int:
        return 4 * self.width * math.prod(self.extents)

    @property
    def weight_bytes(self) -> int:
        kept = self.modes ** (len(self.extents) - 1) * (self.modes // 2 + 1)
        return 8 * self.width**2 * kept

    def fits(self, ranks: int) -> bool:
        """Whether fields, spectra and every rank's weights with gradients fit into memory."""
        available = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
        return 10 * self.field_bytes + 3 * ranks * self.weight_bytes < int(available) * 1024


def compare(cases: list[Case]) -> list[tuple[Cost, Cost] | None]:
    """(ours, the other) for each case that fits, on the ranks that call it."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
    results = []
    for case in cases:
        results.append(_compare(case, mesh) if _all_fit(case, ranks) else None)
        if dist.get_rank() == 0:
            print(*row_of(case, ranks, results[-1]), sep="  ", file=sys.stderr, flush=True)
    return results


def _all_fit(case: Case, ranks: int) -> bool:
    fits = torch.tensor(int(case.fits(ranks)))
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    return bool(fits)


def _compare(case: Case, mesh: DeviceMesh) -> tuple[Cost, Cost]:
    small = Case((16,) * len(case.extents), 4, 2)
    (ours, other), (ours_once, other_once) = _steps(case, mesh), _steps(small, mesh)
    return measured(ours, ours_once), measured(other, other_once)


def _steps(case: Case, mesh: DeviceMesh) -> tuple[Callable[[], None], Callable[[], None]]:
    """Our step, and the other's."""
    layer = SpectralConv(case.width, case.width, (case.modes,) * len(case.extents), bias=False)
    shape = (1, case.width, *case.extents)
    offsets = partition(case.extents[0], mesh.size())
    rows = offsets[mesh.get_local_rank() + 1] - offsets[mesh.get_local_rank()]
    local = torch.randn(1, case.width, rows, *case.extents[1:], requires_grad=True)
    cotangent = torch.randn_like(local)

    def backward(y: Tensor) -> None:
        y.backward(cotangent)
        local.grad = None
        layer.zero_grad()
        prepared.zero_grad()

    prepared = copy.deepcopy(layer)  # as `parallelize` does
    avoid_whole_fields(prepared)

    def ours() -> None:
        backward(prepared(lightning_shard.from_local(local, mesh, 2, shape)).to_local())

    def stock() -> None:
        backward(layer(local))

    def transposed() -> None:
        weight: Any = layer.weight.tensor  # pyright: ignore[reportAttributeAccessIssue] of neuralop
        backward(spectral_conv(local, weight, case.extents[0], mesh.get_group()))

    return ours, stock if mesh.size() == 1 else transposed


def row_of(case: Case, ranks: int, costs: tuple[Cost, Cost] | None) -> list[Any]:
    """A line of the table."""
    other = "stock, one process" if ranks == 1 else "transposed FFT"
    if costs is None:
        return [case, ranks, other, "does not fit", *["-"] * 8]
    ours, theirs = costs
    fewer = f"{theirs.sent / ours.sent:.0f}x" if ours.sent else "-"
    return [
        case, ranks, other, f"{ours.cpu:.3f}", f"{theirs.cpu:.3f}",
        f"{theirs.cpu / ours.cpu:.1f}x", f"{theirs.wall / ours.wall:.1f}x",
        *(f"{c.sent / MIB:.3g}" for c in costs), fewer, *(f"{c.peak / MIB:.0f}" for c in costs),
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="32 modes of 32 channels only")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--modes", type=int, nargs="+", default=[12, 32, 64])
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 128])
    options = parser.parse_args()
    modes, widths = ([32], [32]) if options.quick else (options.modes, options.widths)
    cases = [Case(f, m, w) for w in widths for f in FIELDS for m in modes]
    results = {ranks: start(ranks, compare, cases) for ranks in options.ranks}
    describe()
    rows = [row_of(c, n, found[i]) for i, c in enumerate(cases) for n, found in results.items()]
    table(HEADER, rows)


if __name__ == "__main__":
    main()
