import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from matplotlib.image import imread
from torch.utils.data import DataLoader

from lightning_modules import DarcyDataModule, ErrorPlots, TFNODarcy
from lightning_modules.darcy.error_plots import (
    draw_errors,
    draw_spectra,
    energy_spectrum,
    error_table,
    errors_by_resolution,
)
from tests import training

# two loader processes would take longer to start than these tests
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def wave(n: int, kx: int, ky: int) -> np.ndarray:
    y, x = np.mgrid[:n, :n] / n
    return np.cos(2 * np.pi * (kx * x + ky * y))[None]


@pytest.mark.parametrize("n", [32, 33, 64])
@pytest.mark.parametrize(("kx", "ky"), [(5, 0), (0, 7), (6, 8)])
def test_energy_lies_at_the_wavenumber(n, kx, ky):
    spectrum = energy_spectrum(wave(n, kx, ky))
    k = round(np.hypot(kx, ky))
    assert len(spectrum) == n // 2
    assert spectrum.argmax() == k
    near = spectrum[k - 2 : k + 3].sum()
    assert near == pytest.approx(0.5, rel=0.02)  # of a cosine, whatever the resolution
    assert spectrum[k + 4 :].max() < 1e-3 * near


def test_energy_is_that_of_the_field():
    fields = np.random.default_rng(0).standard_normal((200, 32, 32))
    corners = 1 - np.pi / 4  # beyond the Nyquist wavenumber of a circle
    assert energy_spectrum(fields).sum() == pytest.approx(1 - corners, rel=0.1)


def test_errors_are_found_by_norm_and_resolution():
    metrics = {"test/l2_64": torch.tensor(0.25), "test/l2_16": 0.2, "test/h1_64_baseline": 0.5,
               "val/l2_32": 1.0, "test/loss": 3.0}  # fmt: skip
    assert errors_by_resolution(metrics) == {"h1_baseline": {64: 0.5}, "l2": {16: 0.2, 64: 0.25}}


def test_table_fits_a_terminal():
    norms = ("h1", "h1_baseline", "l2", "l2_baseline")
    errors = {name: {32: 0.0731, 64: 0.0722, 128: 0.1124} for name in norms}
    lines = error_table(errors).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["resolution", "H1", "H1", "mean", "L2", "L2", "mean"]
    assert lines[2].split() == ["32", "7.31", "7.31", "7.31", "7.31"]
    assert lines[4].split() == ["128", "11.24", "11.24", "11.24", "11.24"]


def test_pictures(tmp_path):
    errors = {"l2": {16: 0.1, 32: 0.2}, "l2_baseline": {16: 0.3, 32: 0.3}, "other": {16: 0.1}}
    draw_errors(errors, trained_at=16).savefig(tmp_path / "errors.png")
    pairs = [(wave(n, 3, 0), 0.9 * wave(n, 3, 1)) for n in (16, 32)]
    figure = draw_spectra(pairs, kept_modes=4)
    figure.savefig(tmp_path / "spectra.png")
    assert [axis.get_title() for axis in figure.axes] == [
        "16 x 16 grid points",
        "32 x 32 grid points",
    ]
    assert imread(tmp_path / "spectra.png").std() > 0


def run(folder, domain, data):
    torch.manual_seed(0)
    module = TFNODarcy(n_modes=(4, 4), hidden_channels=4, n_layers=2)
    runner = training.trainer(domain, callbacks=[ErrorPlots()], default_root_dir=folder)
    runner.test(module, datamodule=data, verbose=False)
    return runner


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [(1,), (2,)], ids=str)
def test_after_a_test_on_several_ranks(domain):
    folder = training.shared_path("run")
    data = DarcyDataModule(
        train_resolution=8, num_train=4, num_val=2, num_test=4, batch_size=2, root=str(folder)
    )
    runner = run(folder, domain, data)
    runner.strategy.barrier()
    pictures = sorted(path.name for path in (folder / "gallery").iterdir())
    assert pictures == ["error_by_resolution.png", "error_spectrum.png"]


def test_a_step_must_return_fields(tmp_path):
    class Silent(LightningModule):
        def test_step(self, batch, batch_idx):
            pass

    runner = Trainer(
        accelerator="cpu", logger=False, callbacks=[ErrorPlots()], enable_progress_bar=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(ValueError, match="ErrorPlots needs evaluation steps that return a dict"):
        runner.test(Silent(), DataLoader([0, 1]), verbose=False)
