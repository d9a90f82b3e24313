"""Draws the mistakes of a classifier: its confusion matrix and the samples themselves.

Shapes: B images of one or three channels, (B, C, H, W).
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler
from typing_extensions import override

import lightning_shard
from lightning_modules.shared.pictures import Pictures, new_figure

COLUMNS = 8


class Mistake(NamedTuple):
    """A sample that was classified wrongly: its image (C, H, W), its class, and the prediction."""

    image: np.ndarray
    label: int
    predicted: int


class Mistakes(Pictures):
    """Draw, at the end of a test, the confusion matrix and the misclassified images.

    `confusion.png` and `mistakes.png` go to `gallery/` in the trainer's log directory, and to
    loggers that take images. Every sample counts once, on any number of ranks. Batches must be
    pairs of images and labels, and `test_step` must return the predicted classes, (B,).

    Args:
        num_classes: Number of classes.
        num_images: The number of misclassified images that are drawn at most.
    """

    def __init__(self, num_classes: int = 10, num_images: int = 40) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_images = num_images
        self._seen: dict[tuple[int, ...], tuple[int, int]] = {}
        self._wrong: dict[tuple[int, ...], np.ndarray] = {}
        self._numbers: Iterator[tuple[int, ...]] = iter(())

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen.clear()
        self._wrong.clear()

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, Tensor):
            raise ValueError(
                "Mistakes needs a test_step that returns the predicted classes; got "
                f"{type(outputs).__name__}. Return them, or remove the callback."
            )
        if batch_idx == 0:
            self._numbers = _sample_numbers(trainer, dataloader_idx)
        images, labels = (lightning_shard.gather(entry).cpu() for entry in batch)
        predicted = lightning_shard.gather(outputs).cpu()
        classes: list[int] = labels.tolist()
        guesses: list[int] = predicted.tolist()
        for image, label, guess in zip(images, classes, guesses, strict=True):
            number = next(self._numbers)
            self._seen[number] = (label, guess)
            if label != guess:
                self._wrong[number] = image.float().numpy()

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seen, wrong = _of_all_ranks(self._seen), _of_all_ranks(self._wrong)
        if not trainer.is_global_zero:
            return
        confusion = np.zeros((self.num_classes, self.num_classes), dtype=int)
        for label, predicted in seen.values():
            confusion[label, predicted] += 1
        mistakes = [Mistake(image, *seen[number]) for number, image in sorted(wrong.items())]
        pictures = {
            "confusion": draw_confusion(confusion),
            "mistakes": draw_mistakes(mistakes[: self.num_images], len(mistakes), len(seen)),
        }
        self.save(trainer, pictures)
        print(f"Confusion matrix and mistakes: {self._directory}")


def _sample_numbers(trainer: Trainer, dataloader_idx: int) -> Iterator[tuple[int, ...]]:
    """Return an identity of each sample that this rank reads, in order.

    Samplers of several processes repeat samples, so that all have as many: these get one number.
    """
    loaders: Any = trainer.test_dataloaders
    chosen: Any = loaders[dataloader_idx] if isinstance(loaders, Sequence) else loaders
    indices: Iterable[int] = chosen.sampler
    numbered = isinstance(chosen.sampler, SequentialSampler | DistributedSampler)
    if numbered:
        return ((dataloader_idx, index) for index in indices)
    replica = (trainer.distributed_sampler_kwargs or {}).get("rank", 0)
    return ((dataloader_idx, replica, place) for place in itertools.count())


def _of_all_ranks(found: dict[tuple[int, ...], Any]) -> dict[tuple[int, ...], Any]:
    everywhere: list[dict[tuple[int, ...], Any]] = [found]
    if dist.is_initialized():
        everywhere = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, found)
    return {number: value for each in everywhere for number, value in each.items()}


def draw_confusion(confusion: np.ndarray) -> Figure:
    """Draw how often each class was taken for each.

    Args:
        confusion: Numbers of samples, (classes, classes): rows are true classes, columns predicted.
    """
    size = len(confusion)
    figure = new_figure(1.4 + 0.42 * size, 1.4 + 0.42 * size)
    axis = figure.subplots()
    mistakes = confusion * (1 - np.eye(size, dtype=int))
    axis.imshow(mistakes, cmap="Reds", vmin=0, vmax=max(1, 2 * mistakes.max()))
    for (row, column), count in np.ndenumerate(confusion):
        if count:
            weight = "normal" if row == column else "bold"
            color = "0.35" if row == column else "black"
            axis.text(column, row, str(count), ha="center", va="center", color=color, weight=weight)
    axis.set(xticks=range(size), yticks=range(size), xlabel="predicted", ylabel="true class")
    axis.tick_params(length=0)
    total = confusion.sum()
    axis.set_title(f"{total - mistakes.sum()} of {total} correct", fontsize=11)
    return figure


def draw_mistakes(mistakes: Sequence[Mistake], wrong: int, total: int) -> Figure:
    """Draw misclassified images with their class and the prediction.

    Args:
        mistakes: The mistakes to draw.
        wrong: The number of all mistakes.
        total: The number of samples that were classified.
    """
    rows = max(1, -(-len(mistakes) // COLUMNS))
    figure = new_figure(1.1 * COLUMNS, 1.35 * rows + 0.5)
    shown = "" if len(mistakes) == wrong else f", the first {len(mistakes)}"
    figure.suptitle(
        f"{wrong} of {total} misclassified{shown}: true class → prediction", fontsize=11
    )
    axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, (image, label, predicted) in zip(axes, mistakes, strict=False):
        low, high = image.min(), image.max()
        image = (image - low) / max(high - low, 1e-6)
        axis.imshow(image.transpose(1, 2, 0).squeeze(), cmap="gray_r")
        axis.set_title(f"{label} → {predicted}", fontsize=10, pad=3)
    return figure
