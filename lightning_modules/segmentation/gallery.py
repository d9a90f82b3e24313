"""Pictures of segmentations: image, true and predicted classes, for `VolumeSegmentation`.

Every rank gathers the volumes, since that is a collective; only global rank 0 draws.
"""

from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from matplotlib import colormaps
from matplotlib.figure import Figure
from typing_extensions import override

import lightning_shard
from lightning_modules.shared.pictures import Pictures, new_figure

KEYS = ("image", "label", "predicted")


class SegmentationGallery(Pictures):
    """Save planes of the first test volumes: the image, what is true, and what is predicted.

    The picture goes to `gallery/segmentation.png` in the trainer's log directory, and to loggers
    that take images. Of each volume it shows the plane, along its last dim, with the most true
    classes and voxels.

    Args:
        volumes: The number of volumes, one for each row.
    """

    def __init__(self, volumes: int = 3) -> None:
        super().__init__()
        self.volumes = volumes
        self._planes: list[list[np.ndarray]] = []
        self._classes: tuple[str, ...] = ()

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        missing = self.volumes - len(self._planes)
        if missing <= 0:
            return
        whole = [lightning_shard.gather(outputs[key]).float().cpu().numpy() for key in KEYS]
        for image, label, predicted in list(zip(*whole, strict=True))[:missing]:
            self._planes.append(plane_of(image[0], label[0], predicted))
        self._classes = getattr(pl_module, "classes", ())

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._planes:
            self.save(trainer, {"segmentation": draw_planes(self._planes, self._classes)})
            print(f"Segmentation: {self._directory / 'segmentation.png'}")
        self._planes = []


def plane_of(image: np.ndarray, label: np.ndarray, predicted: np.ndarray) -> list[np.ndarray]:
    """Return the plane of three volumes (X, Y, Z) that shows most: (X, Y) each."""
    kinds = [np.count_nonzero(label == c, axis=(0, 1)) for c in range(1, int(label.max()) + 1)]
    if not kinds:
        best = image.shape[2] // 2
    else:
        seen = np.count_nonzero(kinds, axis=0)
        best = int(np.argmax(seen * label[..., 0].size + np.sum(kinds, axis=0)))
    return [volume[..., best] for volume in (image, label, predicted)]


def draw_planes(planes: list[list[np.ndarray]], classes: tuple[str, ...]) -> Figure:
    """Draw one row per volume.

    Args:
        planes: Image, true and predicted classes of each, (X, Y).
        classes: Their names.
    """
    figure = new_figure(6.2, 2.0 * len(planes) + 0.4)
    axes = figure.subplots(len(planes), len(KEYS), squeeze=False)
    colours = colormaps["viridis"].resampled(len(classes))
    shown: Any = None
    for axis, title in zip(axes[0], ("image", "truth", "prediction"), strict=True):
        axis.set_title(title, fontsize=10)
    for row, plane in zip(axes, planes, strict=True):
        for axis, key, values in zip(row, KEYS, plane, strict=True):
            if key == "image":
                axis.imshow(values, cmap="gray")
            else:
                style = {"vmin": -0.5, "vmax": len(classes) - 0.5, "interpolation": "nearest"}
                shown = axis.imshow(values, cmap=colours, **style)
            axis.set_axis_off()
    bar = figure.colorbar(shown, ax=axes, shrink=0.6, ticks=range(len(classes)))
    bar.ax.set_yticklabels([name.replace("_", " ") for name in classes], fontsize=8)
    return figure
