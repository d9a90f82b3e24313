"""Puts pictures of a run into files in its log directory, and into loggers that take them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from typing_extensions import override


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of so many inches, independent of pyplot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


class Pictures(Callback):
    """A callback that draws what evaluation steps return, for files in `gallery/` and for loggers.

    The folder is in the trainer's log directory.
    """

    def __init__(self) -> None:
        self._directory = Path()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # on every rank: log_dir is broadcast from rank 0
        self._directory = Path(trainer.log_dir or trainer.default_root_dir) / "gallery"

    def save(self, trainer: Trainer, pictures: Mapping[str, Figure]) -> None:
        """Write each picture to a file of its name, and hand it to the loggers."""
        for name, figure in pictures.items():
            save_picture(trainer, figure, self._directory / f"{name}.png", name)


def save_picture(trainer: Trainer, figure: Figure, path: Path, tag: str) -> None:
    """Write `figure` and hand it to the loggers that have a way to take it.

    Args:
        trainer: The trainer, whose loggers get the picture.
        figure: The picture.
        path: The `.png` file; its folder is made.
        tag: The name of the picture in loggers.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    for logger in trainer.loggers:  # they share no interface for pictures
        experiment: Any = getattr(logger, "experiment", None)
        log_image: Any = getattr(logger, "log_image", None)
        if hasattr(experiment, "add_figure"):  # TensorBoard
            experiment.add_figure(tag, figure, trainer.global_step)
        elif log_image is not None:  # Weights & Biases
            log_image(tag, [str(path)], step=trainer.global_step)
