"""Runs a segmentation network from a Zarr file to a Zarr file, in a process of limited memory.

`python -m benchmarks.file_to_file --pixels 16384 --tiles 512 --folder /scratch` makes a picture of
random numbers, and lets a U-Net with batch norm in training mode compute it in tiles. It may
take `--limit` MiB more than it holds as it begins (RLIMIT_DATA of Linux), most of which torch has
mapped. `--compare` computes the whole picture, too, without a limit.
"""

import argparse
import itertools
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import zarr
from torch import Tensor, nn

from lightning_shard import FieldFile, in_tiles

# settings of libraries that take memory for each of their threads
SPARING = {
    "MKL_DISABLE_FAST_MM": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "ZARR_THREADING__MAX_WORKERS": "1",
}


class Block(nn.Sequential):
    """Two convolutions, each with batch norm."""

    def __init__(self, inside: int, outside: int) -> None:
        parts: list[nn.Module] = []
        for channels in (inside, outside):
            parts += [
                nn.Conv2d(channels, outside, 3, padding=1, bias=False),
                nn.BatchNorm2d(outside),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*parts)


class UNet(nn.Module):
    """Gives a number for each of two classes at each pixel.

    Args:
        width: The channels at full resolution.
        depth: The number of coarser levels.
    """

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = Block(1, width)
        self.down = nn.ModuleList(map(Block, widths[:-1], widths[1:]))
        self.up = nn.ModuleList(map(Block, [a + b for a, b in itertools.pairwise(widths)], widths))
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, H, W) -> (B, 2, H, W)."""
        levels = [self.first(x)]
        for block in self.down:
            levels.append(block(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for block in reversed(self.up):
            # a name for what is interpolated would keep it while the block runs
            x = block(torch.cat([F.interpolate(x, scale_factor=2), levels.pop()], 1))
        return self.last(x)


def make(path: Path, pixels: int, block: int = 1024) -> None:
    """Write a picture of random numbers, one block after the other."""
    if path.exists():
        return
    chunks = (1, 1, block, block)
    array = zarr.open_group(path, mode="w").create_array(
        "x", shape=(1, 1, pixels, pixels), chunks=chunks, dtype="float32"
    )
    numbers = np.random.default_rng(0)
    for top in range(0, pixels, block):
        rows = numbers.standard_normal((block, pixels), dtype=np.float32)
        array[0, 0, top : top + block] = rows[: pixels - top]


def network(width: int) -> nn.Module:
    """Return the network in training mode, as every process makes it."""
    torch.manual_seed(0)
    return UNet(width)


def data_of_process() -> int:
    """Return the MiB that count for RLIMIT_DATA."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmData"))


def compute(options: argparse.Namespace) -> None:
    """Compute the picture in tiles, within the limit."""
    torch.set_num_threads(1)
    held = data_of_process()
    limit = (held + options.limit) * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    module, folder = network(options.width), Path(options.folder)
    begin, cpu = time.monotonic(), time.process_time()
    files = {"source": FieldFile(folder / "in.zarr"), "sink": folder / "out.zarr"}
    with torch.inference_mode(), in_tiles(
        module, options.tiles, tile_memory=folder, **files
    ) as fields:  # fmt: skip
        for field in fields:
            module(field)
    print(
        f"{options.pixels}² pixels, {options.tiles} tiles, width {options.width}: "
        f"{time.monotonic() - begin:.0f} s, {time.process_time() - cpu:.0f} CPU s within "
        f"{options.limit} MiB beside the {held} of the beginning"
    )


def compare(options: argparse.Namespace) -> None:
    """Print the largest difference from the whole picture, relative to its largest value."""
    folder = Path(options.folder)
    opened, written = (zarr.open_group(folder / name, mode="r") for name in ("in.zarr", "out.zarr"))
    whole = torch.from_numpy(np.asarray(opened["x"]))
    module = network(options.width)
    with torch.inference_mode():
        wanted = module(whole)
    found = torch.from_numpy(np.asarray(written["prediction"]))
    error = (found - wanted).abs().max() / wanted.abs().max()
    print(f"{options.pixels}²: {error:.1e} from the whole picture")


def main() -> None:
    """Make the picture, and compute it in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pixels", type=int, default=2048)
    parser.add_argument("--tiles", type=int, default=16)
    parser.add_argument("--width", type=int, default=4, help="channels at full resolution")
    parser.add_argument("--limit", type=int, default=1024, help="MiB beside those of the beginning")
    parser.add_argument("--folder", default=".", help="where pictures lie, and tiles wait")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        compute(options)
        return
    folder = Path(options.folder)
    make(folder / "in.zarr", options.pixels)
    shutil.rmtree(folder / "out.zarr", ignore_errors=True)
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.file_to_file", *sys.argv[1:], "--inner"],
        check=True,
        env={**SPARING, **os.environ},
    )
    if options.compare:
        compare(options)


if __name__ == "__main__":
    main()
