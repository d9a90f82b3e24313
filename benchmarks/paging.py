"""Counts what a budget of device memory moves over the link, and what the pager costs an operator.

    python -m benchmarks.paging --networks U-Net --resolution 512 --tiles 8
    python -m benchmarks.paging --overhead
    python -m benchmarks.paging --networks U-Net TFNO --resolution 2048 --clock 1xH100

The device is the fake XPU of the tests, which counts every storage in the memory of the host: peaks
and bytes are those of a device, times are not. Peaks are MiB above parameters and gradients.
"Saved" is `activation_offload`: what autograd keeps leaves, above a budget or all of it. "Paged"
is the pager of tiles around the whole step, without tiles; "tiles" compute with it, with budgets
and without. Needs a C++ compiler and a checkout. With `--clock` a step takes what `plan` says of a
device, and "to least" is its time over the longer one of computation and of both ways of the link.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

if __name__ == "__main__":
    from tests import fake_xpu

    fake_xpu.install(devices=1, memory_bytes=2**34)

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_shard
from benchmarks.common import MIB, describe, table
from benchmarks.memory import T5, Operator
from benchmarks.networks import Task, UNet, ViT
from lightning_shard import shard
from lightning_shard.lab.clusters import read_cluster
from lightning_shard.memory import offload
from lightning_shard.memory.paging.device_pager import pager_of
from lightning_shard.memory.paging.host_memory import Memory
from lightning_shard.memory.paging.pager import Pager
from lightning_shard.memory.paging.pages import Driver
from lightning_shard.tiles.tile_tensor import Tiles

Step = Callable[[], Tensor]


def image(resolution: int, channels: int = 3) -> Tensor:
    """(1, channels, resolution, resolution)."""
    return torch.randn(1, channels, resolution, resolution)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "U-Net": (lambda: UNet(32), image),
    "TFNO": (lambda: Operator(32), partial(image, channels=1)),
    "ViT": (lambda: ViT(256, 4, 4), image),
    "T5": (lambda: T5(512), lambda n: torch.randint(2, 1000, (1, n))),
}


@contextlib.contextmanager
def saved(net: nn.Module, budget: int | None) -> Iterator[Any]:
    """Keep what autograd saves within a budget, of 0 where it is None."""
    mover = offload.Mover(Driver())
    before, offload.MOVER = offload.MOVER, mover
    offload.offload([net], budget or 0)
    try:
        yield lambda: [*mover._pages.values()]
    finally:
        offload.MOVER = before


@contextlib.contextmanager
def paged(net: nn.Module, budget: int | None) -> Iterator[Any]:
    """Keep everything that operators make within a budget."""
    device = next(net.parameters()).device
    pager = Pager(device, budget, Memory(pinned=device.type != "cpu"))
    with pager.paging(), torch.autograd.set_multithreading_enabled(False):
        yield lambda: [pager.pages]


@contextlib.contextmanager
def tiled(net: nn.Module, budget: int | None, tiles: int) -> Iterator[Any]:
    """Compute each step in tiles."""
    device = next(net.parameters()).device
    pager = pager_of(device, budget or 0)
    assert pager is not None
    grid = Tiles((tiles,), pager)

    def step(x: Tensor) -> None:
        net(shard(x, grid, 2).to(device)).square().mean().backward()

    pages = [pager.pages]
    yield step, lambda: pages
    grid.close()


def measured(name: str, resolution: int, way: Any, share: float | None, rounds: int) -> list[float]:
    """Peak MiB, MiB out, MiB back, processor ms of a step in which `share` of plain may stay."""
    torch.manual_seed(0)
    make, sample = NETWORKS[name]
    net, x = make().to("xpu"), sample(resolution)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    before = torch.accelerator.memory_allocated()
    found: list[list[float]] = []

    def alone(x: Tensor) -> None:
        net(x.to("xpu")).square().mean().backward()

    with way(net, None if share is None else int(share)) if way else contextlib.nullcontext() as of:
        step, of = of if isinstance(of, tuple) else (alone, of)
        for _ in range(rounds + 1):
            pages = of() if of else []
            moved = sum(p.out for p in pages), sum(p.back for p in pages)
            torch.accelerator.reset_peak_memory_stats()
            begin = time.process_time()
            step(x)
            spent = time.process_time() - begin
            pages = of() if of else []
            found.append([
                (torch.accelerator.max_memory_allocated() - before) / MIB,
                (sum(p.out for p in pages) - moved[0]) / MIB,
                (sum(p.back for p in pages) - moved[1]) / MIB,
                1e3 * spent,
            ])  # fmt: skip
    return [statistics.median(column) for column in zip(*found[1:], strict=True)]


def compare(names: list[str], resolution: int, rounds: int, tiles: int) -> list[list[str]]:
    """Rows of all ways and of budgets of 54 and 27 % of the plain peak."""
    rows: list[list[str]] = []
    in_tiles = partial(tiled, tiles=tiles)
    of_tiles = [(f"{tiles} tiles", in_tiles, part) for part in (0.54, 0.27, None)] if tiles else []
    for name in names:
        plain = measured(name, resolution, None, None, rounds)
        for way, call, part in (
            ("plain", None, None), ("saved", saved, None), ("saved", saved, 0.54),
            ("saved", saved, 0.27), ("paged", paged, 0.54), ("paged", paged, 0.27), *of_tiles,
        ):  # fmt: skip
            budget = None if part is None else part * plain[0] * MIB
            found = measured(name, resolution, call, budget, rounds) if call else plain
            least = 0.0 if part is None else (1 - part) * plain[0]
            share = f"{max(found[1:3]) / least:.2f}" if least else ""
            size = "" if part is None else f"{part:.0%}"
            rows.append([name, way, size, *(f"{value:.0f}" for value in found), share])
    return rows


def by_clock(names: list[str], resolution: int, cluster: str) -> list[list[str]]:
    """Rows of budgets of 60 to 20 % of the plain peak, on the clock of a device."""
    rows: list[list[str]] = []
    rate = read_cluster(cluster).device.host_rate
    for name in names:
        make, sample = NETWORKS[name]
        samples: Any = [torch.zeros(()).expand(sample(resolution).shape)]
        batch = DataLoader(samples, batch_size=None)
        plan = partial(lightning_shard.plan, mesh=(1, 1), cluster=cluster)
        plain = plan(Task(make()), batch)
        for part in (1.0, 0.6, 0.54, 0.4, 0.27, 0.2):
            budget = f"{part * plain.memory / 2**30:.4f}GB"
            found = plan(Task(make()), batch, activation_offload=budget if part < 1 else False)
            ms = [1e3 * t for t in (found.seconds, found.compute)]
            ms += [1e3 * moved / rate for moved in (found.to_host, found.from_host)]
            least = max(ms[1], ms[2] + ms[3])
            held = f"{found.memory / MIB:.0f}"
            rows.append(
                [name, f"{part:.0%}", held, *(f"{t:.0f}" for t in ms), f"{ms[0] / least:.2f}"]
            )
    return rows


def overhead(operators: int = 4000, budget: int | None = None) -> float:
    """Microseconds that the pager adds to an operator on tensors that it knows."""
    device = torch.device("cpu")
    x = torch.randn(64, 64)

    def chain() -> None:
        y = x
        for _ in range(operators // 4):
            y = (y.add(x).mul(0.5)).view(4096).view(64, 64)

    def timed() -> float:
        begin = time.process_time()
        chain()
        return time.process_time() - begin

    pager = Pager(device, budget, small=1024)
    plain, with_pager = [], []
    chain()
    for _ in range(5):
        plain.append(timed())
        with pager.paging():
            with_pager.append(timed())
    return 1e6 * (statistics.median(with_pager) - statistics.median(plain)) / operators


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiles", type=int, default=0, help="also in so many tiles")
    parser.add_argument("--overhead", action="store_true", help="only the cost of an operator")
    parser.add_argument("--clock", help="a cluster as `plan` takes it, such as 1xH100")
    options = parser.parse_args()
    torch.set_num_threads(1)
    describe()
    if options.clock:
        rows = by_clock(options.networks, options.resolution, options.clock)
        table(["network", "budget", "peak MiB", "ms", "compute", "out", "back", "to least"], rows)
        return
    for budget in (None, 2**40, 2**20):
        print(f"budget {budget}: {overhead(budget=budget):.1f} us an operator")
    if not options.overhead:
        rows = compare(options.networks, options.resolution, options.rounds, options.tiles)
        table(["network", "way", "budget", "peak MiB", "out", "back", "CPU ms", "to least"], rows)


if __name__ == "__main__":
    main()
