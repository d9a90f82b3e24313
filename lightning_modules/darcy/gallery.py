"""Pictures of predictions: a Callback for modules whose steps return x, y and prediction.

It draws what the evaluation steps computed anyway. Every rank gathers the fields, since that is a
collective; only global rank 0 draws.

Shapes: fields are (B, 1, H, W).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

import lightning_shard
from lightning_modules.shared.pictures import Pictures, new_figure, save_picture

COLUMNS = ("input", "truth", "prediction", "absolute error")


class PredictionGallery(Pictures):
    """Save input, truth, prediction and error of some samples as pictures, one for each loader.

    Pictures go to `gallery/` in the trainer's log directory. Their names carry the resolution of
    the loader's fields: `epoch_0004_64.png` and so on while fitting, `final_64.png` at the end of
    training, `test_64.png` after a test. Loggers that take images get them too. `validation_step`
    and `test_step` must return a dict with "x", "y" and "prediction".

    Args:
        every_n_epochs: Epochs between two pictures.
        num_samples: Samples (rows) per picture, taken from the first batch of an evaluation.
        dataloader_idx: The index of the evaluation loader to draw from; by default all of them.
    """

    def __init__(
        self, every_n_epochs: int = 5, num_samples: int = 3, dataloader_idx: int | None = None
    ) -> None:
        super().__init__()
        self.every_n_epochs = every_n_epochs
        self.num_samples = num_samples
        self.dataloader_idx = dataloader_idx
        self._fields: dict[int, dict[str, np.ndarray]] = {}
        self._announced = False

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fields.clear()

    on_test_start = on_validation_start

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Gather the fields of the first batch; a collective, so on every rank."""
        first = batch_idx == 0 and not trainer.sanity_checking
        if first and self.dataloader_idx in (None, dataloader_idx):
            fields = whole_fields("PredictionGallery", outputs, self.num_samples)
            self._fields[dataloader_idx] = fields

    on_test_batch_end = on_validation_batch_end

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch
        if not trainer.sanity_checking and (epoch + 1) % self.every_n_epochs == 0:
            self._draw(trainer, f"epoch_{epoch:04d}")

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, "final")
        self._announce(trainer, "final")

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, "test")
        self._announce(trainer, "test")

    def _draw(self, trainer: Trainer, when: str) -> None:
        if not trainer.is_global_zero:
            return
        for loader, name in loader_names(self._fields).items():
            figure = draw_fields(**self._fields[loader])
            path = self._directory / f"{when}_{name}.png"
            save_picture(trainer, figure, path, f"gallery_{name}")

    def _announce(self, trainer: Trainer, when: str) -> None:
        if trainer.is_global_zero and self._fields and not self._announced:
            print(f"Predictions: {self._directory / when}_*.png")
            self._announced = True


def loader_names(fields: Mapping[int, Mapping[str, np.ndarray]]) -> dict[int, str]:
    """Name the fields of each loader by their resolution, and by the loader where two have one."""
    sizes = {loader: each["y"].shape[1:] for loader, each in fields.items()}
    names = {
        loader: f"{size[0]}" if len(set(size)) == 1 else "x".join(map(str, size))
        for loader, size in sizes.items()
    }
    taken = list(names.values())
    return {
        loader: name if taken.count(name) == 1 else f"{name}_loader{loader}"
        for loader, name in names.items()
    }


def whole_fields(callback: str, outputs: Any, num_samples: int) -> dict[str, np.ndarray]:
    """Return the first channel of x, y and prediction of some samples, (B, H, W) each.

    A collective: all ranks must call it.

    Raises:
        ValueError: If a step did not return them.
    """
    names = ("x", "y", "prediction")
    keys: list[str] = sorted(outputs) if isinstance(outputs, Mapping) else []
    if not set(names) <= set(keys):
        got = keys if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ValueError(
            f"{callback} needs evaluation steps that return a dict with x, y and prediction; got "
            f"{got}. Return them, or remove the callback."
        )
    fields = {name: lightning_shard.gather(outputs[name])[:num_samples, 0] for name in names}
    return {name: field.detach().float().cpu().numpy() for name, field in fields.items()}


def _colors(count: int) -> dict[str, Any]:
    """One color for each of the numbers from 0 on."""
    return {"cmap": colormaps["cividis"].resampled(count), "vmin": -0.5, "vmax": count - 0.5}


def draw_fields(x: np.ndarray, y: np.ndarray, prediction: np.ndarray) -> Figure:
    """Draw one row per sample: input, truth, prediction and absolute error.

    Truth and prediction of a sample share their colours.

    Args:
        x: Input fields, (B, H, W).
        y: True fields, (B, H, W).
        prediction: Predicted fields, (B, H, W).

    Returns:
        The figure, independent of pyplot.
    """
    figure = new_figure(12.0, 2.7 * len(x) + 0.3)
    axes = figure.subplots(len(x), len(COLUMNS), squeeze=False)
    for row, fields in enumerate(zip(x, y, prediction, np.abs(prediction - y), strict=True)):
        shared = {"vmin": min(fields[1].min(), 0.0), "vmax": fields[1].max(), "cmap": "viridis"}
        styles = ({"cmap": "cividis"}, shared, shared, {"vmin": 0.0, "cmap": "magma"})
        for axis, field, style in zip(axes[row], fields, styles, strict=True):
            values = np.unique(field)
            few = len(values) <= 4  # as in a medium of a few materials
            if few:
                field, style = np.searchsorted(values, field), _colors(len(values))
            image = axis.imshow(field, origin="lower", interpolation="nearest", **style)
            axis.set(xticks=[], yticks=[])
            low, high = image.get_clim()
            beyond = field.min() < low, field.max() > high  # drawn in the last colour
            ends = {(True, True): "both", (True, False): "min", (False, True): "max"}
            extend = ends.get(beyond, "neither")
            bar = figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03, extend=extend)
            if few:
                bar.set_ticks(range(len(values)), labels=[f"{value:.4g}" for value in values])
            else:
                bar.formatter.set_powerlimits((-2, 3))  # pyright: ignore[reportAttributeAccessIssue]  # a ScalarFormatter
            bar.ax.tick_params(labelsize=8)
        error = np.linalg.norm(prediction[row] - y[row]) / np.linalg.norm(y[row])
        axes[row, -1].set_xlabel(f"relative L2 error {error:.1%}", fontsize=9)
    for axis, title in zip(axes[0], COLUMNS, strict=True):
        axis.set_title(title, fontsize=11)
    rows, columns = x.shape[1:]
    figure.suptitle(f"{len(x)} samples at {rows} x {columns} grid points", fontsize=11)
    return figure
