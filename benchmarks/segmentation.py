"""A volume segmented whole, over several ranks.

    python -m benchmarks.segmentation --checkpoint last.ckpt --ranks 2 4

The checkpoint is one of configs/segmentation.yaml; without one the weights are random. The volume
is made up, and not one of its training. Memory is what the inference needs beside the weights, on
the rank that needs most. The difference is that of the logits, the largest, from the logits of one
process; beside it the mean Dice of all classes but the background. --thresholds prints the Dice of
a trivial guess instead: the interval of brightness that is best for a class on the training
volumes, applied to the test volumes.
"""

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import monai
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import MIB, Cost, describe, measured, start, table
from lightning_modules import SegmentationDataModule, VolumeSegmentation
from lightning_modules.segmentation.dice import DicePerClass
from lightning_modules.segmentation.phantoms import CLASSES, Phantoms
from lightning_shard import init_mesh, split_inputs

SMALL: Any = {"filters": [8, 16, 32, 64], "strides": [1, 2, 2, 2], "deep_supervision": 1}
SAMPLE = 1000  # later than those of the config
WHOLE = (slice(None),) * 3
BINS = 100


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
    way: str, checkpoint: Path | None, extents: tuple[int, int, int]
) -> tuple[Cost, Tensor]:
    """What the way costs, and the logits that it gives; every rank calls it."""
    module = network(checkpoint)
    image = Phantoms(extents).image(SAMPLE, WHOLE)[None, None]
    small = image[..., :16, :16, :16]
    split = contextlib.nullcontext()
    if way.endswith("ranks"):
        split = split_inputs(module, init_mesh({"domain": dist.get_world_size()}), 2)

    with torch.inference_mode(), split:
        cost = measured(lambda: module(image), lambda: module(small))
        return cost, module(image)[0].clone()


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
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--extents", type=int, nargs=3, default=[36, 30, 26])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--thresholds", action="store_true", help="the trivial guess alone")
    options = parser.parse_args()
    if options.thresholds:
        dice = thresholds()
        table([*CLASSES[1:], "mean"], [[f"{d:.3f}" for d in (*dice, np.mean(dice))]])
        return
    describe()
    extents = tuple(options.extents)
    print(f"MONAI {monai.__version__}, {extents} voxels")
    ways = {"whole": 1, **{f"{n} ranks": n for n in options.ranks}}
    found: dict[str, tuple[Cost, Tensor]] = {
        way: start(ranks, inferred, way, options.checkpoint, extents) for way, ranks in ways.items()
    }
    label = Phantoms(extents).label(SAMPLE, WHOLE)
    whole, expected = found["whole"]
    rows = [
        [way, f"{cost.peak / MIB:.0f}", f"{cost.peak / whole.peak:.2f}", f"{cost.wall:.2f}",
         f"{cost.cpu:.2f}", f"{(logits - expected).abs().max():.0e}",
         f"{dice_of(logits.argmax(0), label)[1:].nanmean():.3f}"]
        for way, (cost, logits) in found.items()
    ]  # fmt: skip
    head = ["way", "MiB", "to whole", "wall s", "CPU s", "difference", "Dice"]
    table(head, rows)


if __name__ == "__main__":
    main()
