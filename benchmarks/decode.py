"""A coder of images or videos whose latents are split over ranks, beside one process and tiles.

    python -m benchmarks.decode --coder video --ranks 1 2 4

Networks of diffusers with random weights decode one sample within `split_inputs`. Memory is what a
decoding needs beside the weights, on the rank that needs most. The error is the largest difference
from one process, relative to the largest value. Tiles are diffusers' own way to save memory: it
decodes parts that overlap, and blends them. --picture draws where the two ways differ from one
process.
"""

import argparse
import contextlib
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import MIB, Cost, describe, measured, start, table
from lightning_shard import init_mesh, split_inputs

WIDTHS = (32, 64, 128, 128)
models: Any = diffusers  # which imports lazily, and says tuple[int] of several


def _image() -> tuple[Any, Tensor]:
    down, up = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    coder = models.AutoencoderKL(3, 3, down, up, WIDTHS, 2, sample_size=256)
    return coder, torch.randn(1, 4, 64, 64)


def _video() -> tuple[Any, Tensor]:
    coder = models.AutoencoderKLHunyuanVideo(
        block_out_channels=WIDTHS, layers_per_block=1, latent_channels=8
    )
    coder.tile_sample_min_height = coder.tile_sample_min_width = 128
    coder.tile_sample_stride_height = coder.tile_sample_stride_width = 96
    coder.tile_sample_min_num_frames = 64
    return coder, torch.randn(1, 8, 2, 64, 24)


CODERS = {"image": (_image, 2), "video": (_video, 3)}


def decoded(way: str, name: str, dtype: torch.dtype) -> tuple[Cost, np.ndarray]:
    """What the way costs and gives; every rank calls it."""
    make, dim = CODERS[name]
    coder, latents = make()
    coder, latents = coder.eval().to(dtype), latents.to(dtype)
    if way == "tiles":
        coder.enable_tiling()
    mesh = init_mesh({"domain": dist.get_world_size()})
    is_split = way.endswith("ranks")
    split = split_inputs(coder, mesh, dim, methods=["decode"]) if is_split else None
    small = latents[..., :16, :]
    with torch.inference_mode(), split or contextlib.nullcontext():
        cost = measured(lambda: coder.decode(latents), lambda: coder.decode(small))
        return cost, coder.decode(latents).sample.numpy()


def main() -> None:
    """Print the table, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coder", choices=CODERS, default="image")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--double", action="store_true", help="float64, to see what rounding is")
    parser.add_argument("--picture", type=Path, help="the file that is written")
    options = parser.parse_args()
    dtype = torch.float64 if options.double else torch.float32
    describe()
    print(f"diffusers {diffusers.__version__}, {options.coder}, {dtype}")
    ways = {"whole": 1, "tiles": 1, **{f"{n} ranks": n for n in options.ranks}}
    found: dict[str, tuple[Cost, Any]] = {
        way: start(ranks, decoded, way, options.coder, dtype) for way, ranks in ways.items()
    }
    whole, expected = found["whole"]
    rows = [
        [way, f"{cost.peak / MIB:.0f}", f"{cost.peak / whole.peak:.2f}", f"{cost.wall:.2f}",
         f"{cost.cpu:.2f}", f"{cost.sent / 1e6:.1f}",
         f"{np.abs(image - expected).max() / np.abs(expected).max():.0e}"]
        for way, (cost, image) in found.items()
    ]  # fmt: skip
    table(["way", "MiB", "to whole", "wall s", "CPU s", "MB sent", "error"], rows)
    if options.picture:
        images = {way: image for way, (_, image) in found.items() if way != "1 ranks"}
        draw(images, options.picture)


def draw(images: dict[str, Any], path: Path) -> None:
    """The image of one process, and the logarithm of each way's difference from it."""
    import matplotlib.pyplot as plt

    expected = images["whole"]
    figure, axes = plt.subplots(1, len(images), figsize=(3.4 * len(images), 3.6))
    shown: Any = None
    for axis, (way, image) in zip(axes, images.items(), strict=True):
        values = image if way == "whole" else np.abs(image - expected) / np.abs(expected).max()
        values = values[0, :, -1] if values.ndim == 5 else values[0]  # a video's last picture
        field = values.max(0) if way != "whole" else values.mean(0)
        if way == "whole":
            axis.imshow(field, cmap="gray")
            axis.set_title("one process")
        else:
            shown = axis.imshow(np.log10(field + 1e-17), vmin=-16, vmax=0)
            axis.set_title(f"difference,\n{way}")
        axis.set_axis_off()
    figure.colorbar(shown, ax=axes, label="log10 of the difference", shrink=0.8)
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
