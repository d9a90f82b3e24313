"""Pictures of predictions: a Callback for modules whose steps return x, y and prediction.

It draws what the evaluation steps computed anyway. Every rank gathers the fields, since that is a
collective; only global rank 0 draws.

Shapes: fields are (B, 1, H, W).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

import lightning_shard

COLUMNS = ("input", "truth", "prediction", "absolute error")


class PredictionGallery(Callback):
    """Save input, truth, prediction and error of some samples as a picture.

    Pictures go to `gallery/` in the trainer's log directory: `epoch_0004.png` and so on while
    fitting, `final.png` at its end, `test.png` after a test. Loggers that take images get them too.
    `validation_step` and `test_step` must return a dict with "x", "y" and "prediction".

    Args:
        every_n_epochs: Epochs between two pictures.
        num_samples: Samples (rows) per picture, taken from the first batch of an evaluation.
        dataloader_idx: Which of the evaluation loaders to draw from.
    """

    def __init__(
        self, every_n_epochs: int = 5, num_samples: int = 3, dataloader_idx: int = 0
    ) -> None:
        self.every_n_epochs = every_n_epochs
        self.num_samples = num_samples
        self.dataloader_idx = dataloader_idx
        self._directory = Path()
        self._fields: dict[str, np.ndarray] = {}
        self._announced = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # on every rank: log_dir is broadcast from rank 0
        self._directory = Path(trainer.log_dir or trainer.default_root_dir) / "gallery"

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
        if not trainer.sanity_checking:
            self._keep(outputs, batch_idx, dataloader_idx)

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
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._keep(outputs, batch_idx, dataloader_idx)

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, "test")
        self._announce(trainer, "test")

    def _keep(self, outputs: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Gather the fields of the first batch; a collective, so on every rank."""
        if batch_idx != 0 or dataloader_idx != self.dataloader_idx:
            return
        if not isinstance(outputs, Mapping) or not {"x", "y", "prediction"} <= outputs.keys():
            got = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise ValueError(
                "PredictionGallery needs evaluation steps that return a dict with x, y and "
                f"prediction; got {got}. Return them, or remove the callback."
            )
        for name in ("x", "y", "prediction"):
            field = lightning_shard.gather(outputs[name])[: self.num_samples, 0]
            self._fields[name] = field.detach().float().cpu().numpy()

    def _draw(self, trainer: Trainer, name: str) -> None:
        if not (trainer.is_global_zero and self._fields):
            return
        figure = draw_fields(**self._fields)
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{name}.png"
        figure.savefig(path, dpi=120)
        for logger in trainer.loggers:
            _log_picture(logger, figure, path, step=trainer.global_step)

    def _announce(self, trainer: Trainer, name: str) -> None:
        if trainer.is_global_zero and self._fields and not self._announced:
            print(f"Predictions: {self._directory / name}.png")
            self._announced = True


def _log_picture(logger: Any, figure: Figure, path: Path, *, step: int) -> None:
    """Hand the picture to a logger that has a way to take it; loggers share no interface for it."""
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_figure"):  # TensorBoard
        experiment.add_figure("gallery", figure, step)
    elif hasattr(logger, "log_image"):  # Weights & Biases
        logger.log_image("gallery", [str(path)], step=step)


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
    figure = Figure(figsize=(12.0, 2.7 * len(x) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(x), len(COLUMNS), squeeze=False)
    for row, fields in enumerate(zip(x, y, prediction, np.abs(prediction - y), strict=True)):
        shared = {"vmin": min(fields[1].min(), 0.0), "vmax": fields[1].max(), "cmap": "viridis"}
        styles = ({"cmap": "cividis"}, shared, shared, {"vmin": 0.0, "cmap": "magma"})
        for axis, field, style in zip(axes[row], fields, styles, strict=True):
            image = axis.imshow(field, origin="lower", interpolation="nearest", **style)
            axis.set(xticks=[], yticks=[])
            bar = figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03)
            bar.formatter.set_powerlimits((-2, 3))  # pyright: ignore[reportAttributeAccessIssue]  # a ScalarFormatter
            bar.ax.tick_params(labelsize=8)
        error = np.linalg.norm(prediction[row] - y[row]) / np.linalg.norm(y[row])
        axes[row, -1].set_xlabel(f"relative L2 error {error:.1%}", fontsize=9)
    for axis, title in zip(axes[0], COLUMNS, strict=True):
        axis.set_title(title, fontsize=11)
    return figure
