"""Inference in tiles beside MONAI's sliding windows and diffusers' tiled decoding, on one device.

    python -m benchmarks.tiles volume --picture docs/images/tiles.png
    python -m benchmarks.tiles coder
    python -m benchmarks.tiles largest
    python -m benchmarks.tiles cap
    python -m benchmarks.tiles fit --folder /scratch
    python -m benchmarks.tiles step

The device is the fake XPU of the tests, which counts every storage in the memory of the host: peaks
are those of a device, times are not. Peaks are MiB above the weights. The error is the largest
difference from the whole field, relative to the largest value. "largest" counts a training step of
a U-Net at 512² in each way, and computes the largest square that fits in 1 GiB, for peaks grow with
the number of pixels. "cap" trains a step in 16 tiles on a device that has no room for more. "fit"
trains on the CPU by a Trainer, in processes that may take 1 GiB more than they hold as they
begin (RLIMIT_DATA of Linux): plain, and in tiles that wait in files. "step" times what the host
needs for a step of a small U-Net in 8 tiles, beside eight plain steps of an eighth of the rows. All
but these two need a C++ compiler and a checkout.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not {"fit", "step"} & {*sys.argv}:
    from tests import fake_xpu

    fake_xpu.install(devices=1, memory_bytes=56 * 2**20 if "cap" in sys.argv else 2**34)

import torch
from torch import Tensor

from benchmarks.common import MIB, QUIET, describe, table
from benchmarks.networks import Task, UNet
from benchmarks.paging import saved, tiled
from lightning_shard import Tiles, in_tiles, shard
from lightning_shard.memory.recompute import recompute

GIB = 2**30
OPTIMIZER = 4  # parameters, gradients, and two states of Adam
NOTHING = "0"  # of a tile stays on the device when its turn ends
Way = Callable[[], Tensor]


def volume() -> dict[str, Way]:
    """Ways to segment a volume on the host with MONAI's BasicUNet; windows have 32³ voxels."""
    from monai.inferers.utils import sliding_window_inference
    from monai.networks.nets.basic_unet import BasicUNet

    net = BasicUNet(3, 1, 2, features=(16, 16, 32, 64, 128, 16)).to("xpu").eval()
    x = torch.randn(1, 1, 64, 64, 64)

    def tiles(sizes: Any) -> Tensor:
        with in_tiles(net, sizes, tile_budget=NOTHING):
            return net(x)

    def windows(overlap: float) -> Tensor:
        found = sliding_window_inference(
            x, (32, 32, 32), 1, net, overlap, mode="gaussian", sw_device="xpu", device="cpu"
        )
        assert isinstance(found, Tensor)
        return found

    return {
        "whole": lambda: net(x.to("xpu")).cpu(),
        "8 tiles": lambda: tiles(8),
        "2 x 4 tiles": lambda: tiles((2, 4)),
        "windows, 0.25": lambda: windows(0.25),
        "windows, 0.5": lambda: windows(0.5),
    }


def coder() -> dict[str, Way]:
    """Ways to decode an image with an AutoencoderKL of diffusers."""
    from benchmarks.decode import CODERS

    make, dim = CODERS["image"]
    net, latents = make()
    net = net.to("xpu").eval()

    def tiles() -> Tensor:
        with in_tiles(net, 8, dim, methods=["decode"], tile_budget=NOTHING):
            return net.decode(latents).sample

    def blended() -> Tensor:
        net.enable_tiling()
        return net.decode(latents.to("xpu")).sample.cpu()

    return {
        "whole": lambda: net.decode(latents.to("xpu")).sample.cpu(),
        "8 tiles": tiles,
        "diffusers' tiles": blended,
    }


def compare(ways: dict[str, Way], picture: Path | None) -> None:
    """Print what each way needs and how far it is from the whole; draw where it differs."""
    found: dict[str, Any] = {}
    rows: list[list[str]] = []
    for name, way in ways.items():
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        begin = time.process_time()
        with torch.inference_mode():
            found[name] = way().numpy()
        spent = time.process_time() - begin
        peak = (torch.accelerator.max_memory_allocated() - before) / MIB
        error = abs(found[name] - found["whole"]).max() / abs(found["whole"]).max()
        rows.append([name, f"{peak:.1f}", f"{spent:.1f}", f"{error:.0e}"])
    table(["way", "peak MiB", "CPU s", "error"], rows)
    if picture is not None:
        from benchmarks.decode import draw

        draw({name: image for name, image in found.items() if "2 x 4" not in name}, picture)


@contextmanager
def recomputed(net: Any, _: int | None) -> Any:
    """Compute each pair of convolutions again in backward."""
    recompute([*net.down, *net.up])
    yield None


def peak_of(way: Any, resolution: int) -> float:
    """Return the bytes that a training step needs beside parameters and gradients."""
    net, x = UNet(32).to("xpu"), torch.randn(1, 3, resolution, resolution)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    base = torch.accelerator.memory_allocated()
    opened: AbstractContextManager[Any] | None = way(net, None) if way else None
    made = opened.__enter__() if opened else None
    torch.accelerator.reset_peak_memory_stats()
    if isinstance(made, tuple):
        made[0](x)
    else:
        net(x.to("xpu")).square().mean().backward()
    peak = torch.accelerator.max_memory_allocated() - base
    if opened:
        opened.__exit__(None, None, None)
    return peak


def of_tiles(tiles: int) -> Any:
    """Return the way that trains in so many tiles."""
    return lambda net, _: tiled(net, None, tiles)


def largest(resolution: int) -> None:
    """Print the largest square that trains within 1 GiB, of each way."""
    own = OPTIMIZER * sum(p.nbytes for p in UNet(32).parameters())
    rows: list[list[str]] = []
    ways = {"plain": None, "recomputed": recomputed, "offloaded": saved}
    ways |= {f"{n} tiles": of_tiles(n) for n in (8, 16)}
    for name, way in ways.items():
        peak = peak_of(way, resolution)
        side = resolution * ((GIB - own) / peak) ** 0.5
        rows.append([name, f"{peak / MIB:.1f}", f"{side:,.0f}²"])
    table([f"U-Net, {resolution}²", "peak MiB", "largest under 1 GiB"], rows)


def cap() -> None:
    """Train one step at 768² in 16 tiles within 56 MiB, where the whole finds no memory."""
    try:
        peak_of(None, 768)
        print("plain: trained")
    except torch.OutOfMemoryError as error:
        print("plain:", str(error).splitlines()[0])
    print(f"16 tiles: trained, {peak_of(of_tiles(16), 768) / MIB:.1f} MiB beside the gradients")


def fit(tiles: int, resolution: int, folder: str) -> None:
    """Train two steps of a U-Net with a Trainer, with 1 GiB above what is held before."""
    import resource

    from lightning.pytorch import Trainer

    from lightning_shard import TiledStrategy, plan

    module, field = Task(UNet(32)), torch.randn(3, resolution, resolution)
    data: Any = torch.utils.data.DataLoader([field, field])  # pyright: ignore[reportArgumentType]
    planned = plan(module, data, tiles=tiles) if tiles else plan(module, data)
    strategy: Any = TiledStrategy(tiles, tile_memory=folder) if tiles else "auto"
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = re.search(r"VmData:\s+(\d+)", status)
    assert held is not None
    limit = int(held[1]) * 1024 + GIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    begin = time.process_time()
    Trainer(accelerator="cpu", devices=1, max_steps=2, strategy=strategy, **QUIET).fit(module, data)
    waits = f", {planned.on_host / MIB:,.0f} MiB in files" if tiles else ""
    print(
        f"{tiles or 'no'} tiles, {resolution}²: trained, {planned.memory / MIB:,.0f} MiB planned"
        f"{waits}, {time.process_time() - begin:.0f} CPU s"
    )


def fit_each(folder: str, resolution: int) -> None:
    """Train plainly and in tiles, each in a process of its own."""
    # what a tile frees goes back to the system at once, and is not kept for its thread
    own = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    for tiles in (0, 8):
        words = ["fit", "--folder", folder, "--tiles", str(tiles), "--resolution", str(resolution)]
        found = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.tiles", *words],
            check=False, capture_output=True, text=True, env=own,
        )  # fmt: skip
        said = (found.stdout if not found.returncode else found.stderr).strip().splitlines()
        print(said[-1] if not found.returncode else f"{tiles or 'no'} tiles: {said[-1]}")


def step() -> None:
    """Print the CPU time of a step of a U-Net in 8 tiles at 64², and of eight plain steps."""

    def stepping(tiles: int | None, rows: int) -> Callable[[], None]:
        net, field = UNet(8), torch.randn(1, 3, rows, 64)
        grid = None if tiles is None else Tiles((tiles,))

        def run() -> None:
            net(field if grid is None else shard(field, grid, 2)).square().mean().backward()

        return run

    tiled_, plain = stepping(8, 64), stepping(None, 8)
    rows: list[list[str]] = []
    for _ in range(6):
        spent: list[float] = []
        for run, count in ((tiled_, 4), (plain, 32)):
            begin = time.process_time()
            for _ in range(count):
                run()
            spent.append(1e3 * (time.process_time() - begin) / 4)
        rows.append([f"{spent[0]:.1f}", f"{spent[1]:.1f}", f"{spent[0] / spent[1]:.2f}"])
    table(["8 tiles, CPU ms", "eight plain steps", "times as long"], rows[1:])


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["volume", "coder", "largest", "cap", "fit", "step"])
    parser.add_argument("--folder", default=".", help="where tiles wait in files")
    parser.add_argument("--tiles", type=int, help="train in so many tiles alone, or plainly in 0")
    parser.add_argument("--picture", type=Path, help="the file that is written")
    parser.add_argument("--resolution", type=int, default=512, help="at which a step is counted")
    options = parser.parse_args()
    if options.part == "fit" and options.tiles is not None:
        torch.set_num_threads(1)
        fit(options.tiles, options.resolution, options.folder)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    describe()
    if options.part in ("volume", "coder"):
        compare(volume() if options.part == "volume" else coder(), options.picture)
    elif options.part == "fit":
        fit_each(options.folder, options.resolution)
    elif options.part == "step":
        step()
    elif options.part == "largest":
        largest(options.resolution)
    else:
        cap()


if __name__ == "__main__":
    main()
