"""A volume segmented whole, over several ranks, beside MONAI's sliding windows.

    python -m benchmarks.segmentation --checkpoint last.ckpt --ranks 2 4 --picture seams.png

The checkpoint is one of configs/segmentation.yaml; without one the weights are random. The volume
is made up, and not one of its training. Memory is what the inference needs beside the weights, on
the rank that needs most. The difference is that of the logits, the largest, from the logits of one
process; beside it the share of voxels whose class differs, and the mean Dice of all classes but the
background. --thresholds prints the Dice of a trivial guess instead: the interval of brightness that
is best for a class on the training volumes, applied to the test volumes.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import monai
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from monai.inferers.inferer import SlidingWindowInferer
from torch import Tensor, nn

from benchmarks.common import MIB, Cost, describe, measured, start, table
from lightning_modules import SegmentationDataModule, VolumeSegmentation
from lightning_modules.segmentation.dice import DicePerClass
from lightning_modules.segmentation.phantoms import CLASSES, Phantoms
from lightning_shard import init_mesh, split_inputs

SMALL: Any = {"filters": [8, 16, 32, 64], "strides": [1, 2, 2, 2], "deep_supervision": 1}
SAMPLE = 1000  # later than those of the config
WHOLE = (slice(None),) * 3
BINS = 100
WINDOWS: dict[str, tuple[float, str]] = {
    "windows, overlap 1/4": (0.25, "constant"),
    "windows, overlap 1/2, blended": (0.5, "gaussian"),
}


class Windows(nn.Module):
    """A network in windows of what the module gives it: the volume, normalised and padded whole.

    Args:
        network: The network.
        size: Voxels of a window along each dim.
        overlap: Of windows that lie beside each other.
        mode: How they are blended.
    """

    def __init__(self, network: nn.Module, size: int, overlap: float, mode: str) -> None:
        super().__init__()
        self.network = network
        self.inferer = SlidingWindowInferer(size, overlap=overlap, mode=mode)

    def forward(self, volume: Tensor) -> Any:
        return self.inferer(volume, self.network)


def network(checkpoint: Path | None) -> VolumeSegmentation:
    """The module, with the weights of a checkpoint."""
    torch.manual_seed(0)
    saved = torch.load(checkpoint, weights_only=True) if checkpoint else {}
    options = {k: v for k, v in saved.get("hyper_parameters", {}).items() if k in SMALL}
    module = VolumeSegmentation(**(SMALL | options))
    module.configure_model()
    if saved:
        module.load_state_dict(saved["state_dict"])
    return module.eval()


def inferred(
    way: str, checkpoint: Path | None, extents: tuple[int, int, int], window: int, path: Path
) -> Cost:
    """What the way costs; rank 0 saves the logits that it gives. Every rank calls it."""
    module = network(checkpoint)
    image = Phantoms(extents).image(SAMPLE, WHOLE)[None, None]
    small = image[..., :16, :16, :16]
    split = contextlib.nullcontext()
    if way.endswith("ranks"):
        split = split_inputs(module, init_mesh({"domain": dist.get_world_size()}), 2)

    if way in WINDOWS:
        module.network = Windows(module.network, window, *WINDOWS[way])
    with torch.inference_mode(), split:
        cost = measured(lambda: module(image), lambda: module(small))
        logits = module(image)
    if dist.get_rank() == 0:
        np.save(path, logits[0].numpy())
    return cost


def dice_of(predicted: Tensor, label: Tensor) -> Tensor:
    """Of each class; (X, Y, Z) each."""
    dice = DicePerClass(len(CLASSES))
    dice.update(predicted[None], label[None])
    return dice.compute()


def thresholds() -> list[float]:
    """The Dice of each class by the best interval of brightness."""
    data = SegmentationDataModule()
    data.setup("fit")
    edges = torch.linspace(-3, 6, BINS + 1)

    def volumes(name: str) -> list[tuple[Tensor, Tensor]]:
        """The bin of each voxel, and its class."""
        samples = [data.datasets[name][i] for i in range(len(data.datasets[name]))]
        images = [F.instance_norm(s["image"][None])[0, 0] for s in samples]
        return [
            (torch.bucketize(image, edges), s["label"][0])
            for image, s in zip(images, samples, strict=True)
        ]

    train, found = volumes("train"), []
    for kind in range(1, len(CLASSES)):
        lower, upper = _interval(train, kind)
        dice = DicePerClass(len(CLASSES))
        for bins, label in volumes("test"):
            chosen = (bins >= lower) & (bins < upper)
            dice.update(torch.where(chosen, kind, 0)[None], label[None])
        found.append(float(dice.compute()[kind]))
    return found


def _interval(volumes: Sequence[tuple[Tensor, Tensor]], kind: int) -> tuple[int, int]:
    """The bins with the best Dice over all voxels."""
    counts = [
        sum(torch.bincount(bins[mask(label)], minlength=BINS + 2) for bins, label in volumes)
        for mask in (lambda label: label == kind, lambda label: label >= 0)
    ]
    true, every = (F.pad(torch.as_tensor(c).cumsum(0), (1, 0)).double() for c in counts)
    both, chosen = (x[None, :] - x[:, None] for x in (true, every))
    dice = torch.where(chosen > 0, 2 * both / (chosen + true[-1]), 0.0)
    lower, upper = divmod(int(dice.argmax()), BINS + 3)
    return lower, upper


def main() -> None:
    """Print the table, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--extents", type=int, nargs=3, default=[36, 30, 26])
    parser.add_argument("--window", type=int, default=24, help="voxels along each dim")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--thresholds", action="store_true", help="the trivial guess alone")
    parser.add_argument("--picture", type=Path, help="the file that is written")
    options = parser.parse_args()
    if options.thresholds:
        dice = thresholds()
        table([*CLASSES[1:], "mean"], [[f"{d:.3f}" for d in (*dice, np.mean(dice))]])
        return
    describe()
    extents = tuple(options.extents)
    print(f"MONAI {monai.__version__}, {extents} voxels, windows of {options.window}")
    ways = {"whole": 1, **dict.fromkeys(WINDOWS, 1), **{f"{n} ranks": n for n in options.ranks}}
    found: dict[str, tuple[Cost, Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "logits.npy")
        for way, ranks in ways.items():
            cost = start(ranks, inferred, way, options.checkpoint, extents, options.window, path)
            found[way] = cost, torch.from_numpy(np.load(path))
    label = Phantoms(extents).label(SAMPLE, WHOLE)
    whole, expected = found["whole"]
    rows = [
        [way, f"{cost.peak / MIB:.0f}", f"{cost.peak / whole.peak:.2f}", f"{cost.wall:.2f}",
         f"{cost.cpu:.2f}", f"{(logits - expected).abs().max():.0e}",
         f"{100 * (logits.argmax(0) != expected.argmax(0)).double().mean():.2f}",
         f"{dice_of(logits.argmax(0), label)[1:].nanmean():.3f}"]
        for way, (cost, logits) in found.items()
    ]  # fmt: skip
    head = ["way", "MiB", "to whole", "wall s", "CPU s", "difference", "voxels %", "Dice"]
    table(head, rows)
    if options.picture:
        image = Phantoms(extents).image(SAMPLE, WHOLE)
        draw(image, {way: logits for way, (_, logits) in found.items()}, options.picture)


def draw(image: Tensor, logits: dict[str, Tensor], path: Path) -> None:
    """A plane: the classes that each way finds, and its difference from the whole volume's logits.

    It is the plane where most classes are found.
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import BoundaryNorm

    found = {way: values.argmax(0) for way, values in logits.items()}
    plane = max(range(image.shape[2]), key=lambda z: found["whole"][..., z].unique().numel())
    figure, axes = plt.subplots(
        2, len(logits), figsize=(2.3 * len(logits) + 1, 5.6), layout="constrained"
    )
    decades = 10.0 ** np.arange(-8, 2)
    style: dict[str, Any] = {
        "cmap": plt.get_cmap("magma", len(decades)),
        "norm": BoundaryNorm(decades, len(decades), extend="min"),
    }
    classes = {"cmap": plt.get_cmap("viridis", len(CLASSES)), "vmin": -0.5}
    shown: Any = None
    below: Any = None
    for column, (way, values) in zip(axes.T, logits.items(), strict=True):
        shown = column[0].imshow(found[way][..., plane], vmax=len(CLASSES) - 0.5, **classes)
        field = (values - logits["whole"]).abs().amax(0)
        if way == "whole":
            column[0].set_title("whole,\none process")
            column[1].imshow(image[..., plane], cmap="gray")
            column[1].set_title("the image")
        else:
            column[0].set_title(way.replace(", ", "\n", 1))
            below = column[1].imshow(field[..., plane], **style)
            column[1].set_title(f"difference, at most {field.max():.0e}", fontsize=10)
    for axis in axes.flat:
        axis.set_axis_off()
    bar = figure.colorbar(shown, ax=axes[0], ticks=range(len(CLASSES)), shrink=0.8)
    bar.ax.set_yticklabels([name.replace("_", " ") for name in CLASSES])
    figure.colorbar(
        below, ax=axes[1], label="difference of a logit", shrink=0.9,
        format=lambda value, _: f"{value:.0e}",
    )  # fmt: skip
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
