"""One spectral convolution, forward and backward: ours, transposed FFTs, and neuraloperator's own.

    python -m benchmarks.spectral --quick
    python -m benchmarks.spectral --step 1024

On one process ours is compared with the unmodified layer on a plain tensor; on several with the
transposed FFT (benchmarks/transposed_fft.py). Processor time, bytes and memory are those of the
rank that needs most; memory is beyond inputs and weights.

--step is a training step of a whole TFNO instead, with stock code on one process and its field
split over several: one sample, forward, relative L2 loss, backward and Adam. Its bytes are those of
fields and modes, and of FSDP2's collectives where torch calls them through torch.distributed.
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
from neuralop.losses import LpLoss
from neuralop.models import TFNO
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lightning_shard
from benchmarks.common import MIB, Cost, describe, measured, start, table
from benchmarks.transposed_fft import spectral_conv
from lightning_shard.domain.layout import partition
from lightning_shard.memory.neuralop.layers import avoid_whole_fields
from lightning_shard.processes.mesh import make_mesh

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


def cost_of_step(resolution: int, hidden: int, modes: int) -> Cost:
    """Of the ranks that call it."""
    return measured(_tfno_step(resolution, hidden, modes), _tfno_step(32, hidden, modes))


def _tfno_step(resolution: int, hidden: int, modes: int) -> Callable[[], None]:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    net: torch.nn.Module = TFNO((modes, modes), 1, 1, hidden, factorization="tucker", rank=0.1)
    fields = torch.randn(2, 1, 1, resolution, resolution)
    x, y = fields[0], fields[1]
    if ranks > 1:
        mesh = make_mesh("cpu", 1, (ranks,))
        lightning_shard.parallelize(net, mesh)
        x, y = (_split(part, mesh["domain"]) for part in (x, y))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss = LpLoss(d=2, reduction="mean")

    def step() -> None:
        loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _split(field: Tensor, mesh: DeviceMesh) -> Tensor:
    local = lightning_shard.shard(field, mesh, 2).to_local().clone()
    return lightning_shard.from_local(local, mesh, 2, field.shape)


def print_steps(options: argparse.Namespace) -> None:
    """Print the table of steps of a TFNO."""
    sizes = options.step, options.hidden, options.modes[0]
    costs = {ranks: start(ranks, cost_of_step, *sizes) for ranks in options.ranks}
    describe()
    print(f"TFNO, {sizes[0]}², {sizes[1]} channels, {sizes[2]} modes")
    first = next(iter(costs.values()))
    rows = [
        [n, f"{c.cpu:.2f}", f"{c.sent / MIB:.3g}", f"{c.peak / MIB:.0f}",
         f"{c.peak / first.peak:.2f}"]
        for n, c in costs.items()
    ]  # fmt: skip
    table(["ranks", "CPU s", "MiB sent", "peak MiB", "of one process"], rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="32 modes of 32 channels only")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--modes", type=int, nargs="+", help="default: 12, 32 and 64; of steps 32")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--step", type=int, help="the resolution of a TFNO's step, timed instead")
    parser.add_argument("--hidden", type=int, default=32, help="channels of the TFNO")
    options = parser.parse_args()
    if options.step:
        options.modes = options.modes or [32]
        print_steps(options)
        return
    options.modes = options.modes or [12, 32, 64]
    modes, widths = ([32], [32]) if options.quick else (options.modes, options.widths)
    cases = [Case(f, m, w) for w in widths for f in FIELDS for m in modes]
    results = {ranks: start(ranks, compare, cases) for ranks in options.ranks}
    describe()
    rows = [row_of(c, n, found[i]) for i, c in enumerate(cases) for n, found in results.items()]
    table(HEADER, rows)


if __name__ == "__main__":
    main()
