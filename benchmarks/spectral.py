"""One spectral convolution, forward and backward: ours, transposed FFTs, and neuraloperator's own.

    python -m benchmarks.spectral --quick

On one process ours is compared with the unmodified layer on a plain tensor; on several with the
transposed FFT (benchmarks/transposed_fft.py). Bytes are counted at the collectives of rank 0, time
is the shortest of some repeats of the slowest rank, memory is the growth of rank 0 beyond inputs
and weights. Ranks share the cores of the machine.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from neuralop.layers.spectral_convolution import SpectralConv
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import lightning_shard
from benchmarks.common import MIB, conditions, free_bytes, markdown, on_ranks, peak_bytes, seconds
from benchmarks.transposed_fft import spectral_conv
from tests.traffic import counted

FIELDS = ((421, 421), (1024, 1024), (2048, 2048), (128, 128, 128))
HEADER = (
    "field, modes, width", "ranks", "compared with", "ours s", "other s", "faster",
    "ours MiB sent", "other MiB sent", "fewer bytes", "ours peak MiB", "other peak MiB",
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
        return 10 * self.field_bytes + 3 * ranks * self.weight_bytes < free_bytes()


@dataclass
class Result:
    """What one method took."""

    seconds: float
    bytes: int
    peak: int


def measure(step: Any) -> Result:
    """Fields of rank 0: time, bytes sent and peak memory of `step`."""
    with counted() as traffic:
        peak = peak_bytes(step)
    once = seconds(step, 1)
    repeats = max(2, min(10, int(4 / once)))
    return Result(seconds(step, repeats), traffic.bytes, peak)


def compare(cases: list[Case]) -> list[tuple[Result, Result] | None]:
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


def _compare(case: Case, mesh: Any) -> tuple[Result, Result]:
    torch.manual_seed(0)
    layer = SpectralConv(case.width, case.width, (case.modes,) * len(case.extents), bias=False)
    shape = (1, case.width, *case.extents)
    ranks, rows = mesh.size(), case.extents[0]
    local_rows = rows // ranks + (mesh.get_local_rank() < rows % ranks)
    local = torch.randn(1, case.width, local_rows, *case.extents[1:], requires_grad=True)

    def backward(y: Tensor) -> None:
        y.backward(torch.ones(()).expand_as(y))
        local.grad = None
        layer.zero_grad()

    def ours() -> None:
        backward(layer(lightning_shard.from_local(local, mesh, 2, shape)).to_local())

    def stock() -> None:
        backward(layer(local))

    def transposed() -> None:
        backward(spectral_conv(local, layer.weight.tensor, rows, mesh.get_group()))

    return measure(ours), measure(stock if ranks == 1 else transposed)


def row_of(case: Case, ranks: int, results: tuple[Result, Result] | None) -> list[Any]:
    """A line of the table."""
    other = "stock, one process" if ranks == 1 else "transposed FFT"
    if results is None:
        return [case, ranks, other, *["does not fit"] * 2, *["-"] * 6]
    ours, theirs = results
    sent = [f"{r.bytes / MIB:.3g}" for r in results]
    fewer = f"{theirs.bytes / ours.bytes:.0f}x" if ours.bytes else "-"
    return [
        case, ranks, other, f"{ours.seconds:.3f}", f"{theirs.seconds:.3f}",
        f"{theirs.seconds / ours.seconds:.1f}x", *sent, fewer,
        f"{ours.peak / MIB:.0f}", f"{theirs.peak / MIB:.0f}",
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="32 modes of 32 channels only")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    modes, widths = ((32,), (32,)) if options.quick else ((12, 32, 64), (32, 128))
    cases = [Case(f, m, w) for f in FIELDS for m in modes for w in widths]
    results = {ranks: on_ranks(ranks, compare, cases) for ranks in options.ranks}
    print(conditions("neuraloperator", "lightning"))
    print(
        markdown(
            HEADER, [row_of(c, n, r[i]) for i, c in enumerate(cases) for n, r in results.items()]
        )
    )


if __name__ == "__main__":
    main()
