"""Draws the error of a neural operator by resolution and by wavenumber.

Shapes: fields are (B, H, W).
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

from lightning_modules.darcy.gallery import whole_fields
from lightning_modules.shared.pictures import Pictures, new_figure

COLORS = {"l2": "tab:blue", "h1": "tab:orange"}


class ErrorPlots(Pictures):
    """Print and draw, at the end of a test, errors by resolution, and draw spectra of the error.

    A table of resolution x norm in percent takes the place of Lightning's, which has a column for
    each loader. `error_by_resolution.png` shows the logged metrics `test/{norm}_{resolution}`,
    beside those that end in `_baseline`; `error_spectrum.png` has one panel for each test loader.
    They go to `gallery/` in the trainer's log directory, and to loggers that take images.
    `test_step` must return a dict with "x", "y" and "prediction".

    Args:
        num_samples: Samples of each loader's first batch whose spectra are averaged.
    """

    def __init__(self, num_samples: int = 16) -> None:
        super().__init__()
        self.num_samples = num_samples
        self._fields: dict[int, dict[str, np.ndarray]] = {}

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fields.clear()

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
        if batch_idx == 0:
            self._fields[dataloader_idx] = whole_fields("ErrorPlots", outputs, self.num_samples)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or not self._fields:
            return
        pairs = [(fields["y"], fields["prediction"]) for fields in self._fields.values()]
        pairs.sort(key=lambda pair: pair[0].shape[-1])
        modes = getattr(pl_module, "hparams", {}).get("n_modes")
        pictures = {"error_spectrum": draw_spectra(pairs, max(modes) // 2 if modes else None)}
        errors = errors_by_resolution(trainer.callback_metrics)
        if errors:
            data = getattr(trainer, "datamodule", None)
            trained_at = getattr(data, "train_resolution", None)
            pictures["error_by_resolution"] = draw_errors(errors, trained_at)
        self.save(trainer, pictures)
        if errors:
            print(error_table(errors))
            if sum(map(len, errors.values())) == len(trainer.callback_metrics):
                trainer.test_loop.verbose = False  # Lightning's table would say the same again
        print(f"Errors by resolution and wavenumber: {self._directory}")


def errors_by_resolution(metrics: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Sort `test/{norm}_{resolution}` and its `_baseline` by resolution, for each norm.

    Returns:
        For example `{"l2": {32: 0.02, 64: 0.01}, "l2_baseline": {32: 0.2, 64: 0.2}}`.
    """
    found: dict[str, dict[int, float]] = {}
    for name, value in metrics.items():
        if match := re.fullmatch(r"test/([a-z]\w*?)_(\d+)(_baseline)?", name):
            norm, resolution, baseline = match.groups()
            found.setdefault(norm + (baseline or ""), {})[int(resolution)] = float(value)
    return {norm: dict(sorted(values.items())) for norm, values in sorted(found.items())}


def error_table(errors: dict[str, dict[int, float]]) -> str:
    """Write a table of relative errors in percent: one row per resolution, one column per norm.

    Args:
        errors: The result of `errors_by_resolution`.
    """
    norms = list(dict.fromkeys(name.removesuffix("_baseline") for name in errors))
    columns = [name for norm in norms for name in (norm, f"{norm}_baseline") if name in errors]
    titles = [
        f"{name.removesuffix('_baseline').upper()} {'mean' if name.endswith('_baseline') else ''}"
        for name in columns
    ]
    lines = ["Relative test error in % (mean: of the mean training solution)"]
    lines += [f"{'resolution':>10}" + "".join(f"{title.strip():>10}" for title in titles)]
    for resolution in sorted({n for values in errors.values() for n in values}):
        row = [errors[name].get(resolution) for name in columns]
        cells = ("" if value is None else f"{100 * value:.2f}" for value in row)
        lines.append(f"{resolution:>10}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def draw_errors(errors: dict[str, dict[int, float]], trained_at: int | None = None) -> Figure:
    """Draw relative errors by resolution, one line for each norm, baselines dashed.

    Args:
        errors: The result of `errors_by_resolution`.
        trained_at: The training resolution, which is marked.
    """
    figure = new_figure(7.5, 4.0)
    axis = figure.subplots()
    resolutions = sorted({n for values in errors.values() for n in values})
    if trained_at is not None:
        axis.axvline(trained_at, color="0.8", linewidth=6, zorder=0, label="training resolution")
    for name, values in errors.items():
        norm, is_baseline = name.removesuffix("_baseline"), name.endswith("_baseline")
        axis.plot(
            list(values),
            [100 * value for value in values.values()],
            ".--" if is_baseline else "o-",
            color=COLORS.get(norm),
            linewidth=1 if is_baseline else 2,
            label=f"{norm.upper()}, mean solution" if is_baseline else f"{norm.upper()}, network",
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(resolutions, [str(n) for n in resolutions])
    axis.minorticks_off()
    axis.set(xlabel="grid points per side", ylabel="relative test error (%)")
    axis.margins(y=0.1)
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", color="0.9")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def energy_spectrum(fields: np.ndarray) -> np.ndarray:
    """Return the energy by wavenumber, averaged over samples.

    A Hann window hides the jump between opposite edges, which would fill all wavenumbers.

    Args:
        fields: (B, H, W), H = W.

    Returns:
        Energy of the waves that fit k times into the square, k = 0 ... H/2 - 1, in units of the
        squared field.
    """
    n = fields.shape[-1]
    window = np.hanning(n + 1)[:-1]
    window = np.outer(window, window) / np.sqrt(np.mean(np.outer(window, window) ** 2))
    energy = np.abs(np.fft.fft2(fields * window, norm="forward")) ** 2
    k: np.ndarray = np.fft.fftfreq(n, 1 / n)
    shells = np.rint(np.hypot(k[:, None], k)).astype(int).ravel()
    by_sample = [np.bincount(shells, e.ravel())[: n // 2] for e in energy]
    return np.mean(by_sample, axis=0)


def draw_spectra(
    pairs: list[tuple[np.ndarray, np.ndarray]], kept_modes: int | None = None
) -> Figure:
    """Draw the spectra of truth, prediction and error, one panel for each resolution.

    Args:
        pairs: True and predicted fields, (B, H, W) each.
        kept_modes: The highest wavenumber that the Fourier layers keep, which is marked.
    """
    figure = new_figure(4.2 * len(pairs) + 0.6, 4.0)
    axes = figure.subplots(1, len(pairs), sharex=True, sharey=True, squeeze=False)[0]
    for axis, (truth, prediction) in zip(axes, pairs, strict=True):
        if kept_modes is not None:
            axis.axvline(kept_modes, color="0.6", linestyle=":", label="kept by Fourier layers")
        for name, fields, color in (
            ("truth", truth, "0.2"),
            ("prediction", prediction, "tab:blue"),
            ("error", prediction - truth, "tab:red"),
        ):
            spectrum = energy_spectrum(fields)[1:]
            style = "--" if name == "prediction" else "-"
            axis.loglog(np.arange(1, len(spectrum) + 1), spectrum, style, color=color, label=name)
        axis.set(
            xlabel="wavenumber (waves per side)",
            title=f"{truth.shape[-1]} x {truth.shape[-1]} grid points",
        )
        axis.grid(color="0.92")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("energy (squared field)")
    axes[0].legend(frameon=False, fontsize=9)
    return figure
