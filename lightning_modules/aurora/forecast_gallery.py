"""Pictures of forecasts: truth, forecast and difference on the globe, for `AuroraForecast`.

Every rank gathers the fields, since that is a collective; only global rank 0 draws.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from typing_extensions import override

import lightning_shard
from lightning_modules.shared.pictures import Pictures, new_figure

COLUMNS = ("truth", "forecast", "forecast - truth")


class ForecastGallery(Pictures):
    """Save truth, forecast and difference of the last step of the first test sample.

    The picture goes to `gallery/forecast.png` in the trainer's log directory, and to loggers that
    take images.

    Args:
        variables: Surface variables, one for each row.
    """

    def __init__(self, variables: Sequence[str] = ("2t", "10u", "msl")) -> None:
        super().__init__()
        self.variables = variables
        self._fields: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._when = ""

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
        if batch_idx:
            return
        fields = {
            name: [
                lightning_shard.gather(outputs[key].surf_vars[name])[0, 0]
                for key in ("truth", "forecast")
            ]
            for name in self.variables
        }
        self._fields = {
            name: (truth.float().cpu().numpy(), forecast.float().cpu().numpy())
            for name, (truth, forecast) in fields.items()
        }
        metadata = outputs["forecast"].metadata
        hours = 6 * metadata.rollout_step
        self._when = f"{metadata.time[0]:%Y-%m-%d %H:%M}, {hours} hours ahead"

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._fields:
            self.save(trainer, {"forecast": draw_forecast(self._fields, self._when)})
            print(f"Forecast: {self._directory / 'forecast.png'}")
            self._fields = {}


def draw_forecast(fields: dict[str, tuple[np.ndarray, np.ndarray]], title: str) -> Figure:
    """Draw one row per variable; truth and forecast share their colours.

    Args:
        fields: Truth and forecast of each variable, (H, W) each, from north to south.
        title: When it is.
    """
    figure = new_figure(12.0, 2.1 * len(fields) + 0.5)
    axes = figure.subplots(len(fields), len(COLUMNS), squeeze=False)
    for row, (name, (truth, forecast)) in zip(axes, fields.items(), strict=True):
        difference = forecast - truth
        most = float(np.abs(difference).max()) or 1.0
        shared = {"vmin": truth.min(), "vmax": truth.max(), "cmap": "viridis"}
        styles = (shared, shared, {"vmin": -most, "vmax": most, "cmap": "RdBu_r"})
        for axis, field, style in zip(row, (truth, forecast, difference), styles, strict=True):
            image = axis.imshow(field, extent=(0, 360, -90, 90), aspect="auto", **style)
            axis.set(xticks=[0, 90, 180, 270, 360], yticks=[-90, 0, 90])
            axis.tick_params(labelsize=7)
            figure.colorbar(image, ax=axis, fraction=0.046, pad=0.02).ax.tick_params(labelsize=7)
        rmse = float(np.sqrt(np.mean(difference**2)))
        row[0].set_ylabel(name)
        row[-1].set_xlabel(f"root mean square {rmse:.3g}", fontsize=8)
    for axis, column in zip(axes[0], COLUMNS, strict=True):
        axis.set_title(column, fontsize=10)
    figure.suptitle(title, fontsize=10)
    return figure
