"""Where pictures of a run go: to files in its log directory, and to loggers that take them."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def picture_folder(trainer: Trainer) -> Path:
    """The folder `gallery` of the log directory; all ranks must ask, since rank 0 names it."""
    return Path(trainer.log_dir or trainer.default_root_dir) / "gallery"


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches, independent of pyplot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_picture(trainer: Trainer, figure: Figure, path: Path, tag: str) -> None:
    """Write `figure` and hand it to the loggers that have a way to take it.

    Args:
        trainer: Whose loggers.
        figure: The picture.
        path: A `.png` file; its folder is made.
        tag: Its name in loggers.
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
