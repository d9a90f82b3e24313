from unittest.mock import Mock

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from matplotlib.image import imread
from torch import nn
from torch.utils.data import DataLoader

from lightning_modules import PredictionGallery
from lightning_modules.darcy.gallery import draw_fields

pytestmark = [
    # two loader processes would take longer to start than these tests
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


class Scale(LightningModule):
    """Predicts a multiple of the input."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(1, 1, 1)

    def training_step(self, batch, batch_idx):
        return (self.net(batch["x"]) - batch["y"]).square().mean()

    def validation_step(self, batch, batch_idx):
        return {**batch, "prediction": self.net(batch["x"])}

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Several(Scale):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return super().validation_step(batch, batch_idx)

    test_step = validation_step


class Forgetful(Scale):
    def validation_step(self, batch, batch_idx):
        return {"prediction": self.net(batch["x"])}


class Images(Logger):
    """A logger that takes figures as TensorBoard does, or images as Weights & Biases does."""

    name, version = "images", 0

    def __init__(self, way):
        self.received = Mock()
        if way == "add_figure":
            self.experiment = Mock(spec=["add_figure"], add_figure=self.received)
        else:
            self.log_image = self.received

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, params, *args, **kwargs): ...


@pytest.fixture
def loader():
    samples = [{"x": torch.rand(1, 8, 8), "y": torch.rand(1, 8, 8)} for _ in range(4)]
    return DataLoader(samples, batch_size=2)


def run(tmp_path, loader, *, model=None, val=None, logger=False, **options):
    gallery = PredictionGallery(num_samples=2, **options)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=4,
        logger=logger,
        callbacks=[gallery],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
    )
    trainer.fit(model or Scale(), loader, val or loader)
    return trainer


@pytest.mark.slow
def test_pictures_of_a_fit(tmp_path, loader, capsys):
    run(tmp_path, loader, every_n_epochs=2)
    folder = tmp_path / "gallery"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["epoch_0001_8.png", "epoch_0003_8.png", "final_8.png"]
    assert capsys.readouterr().out.count(str(folder / "final_*.png")) == 1


@pytest.mark.slow
def test_every_loader_has_pictures_of_its_own(tmp_path, loader):
    """Two galleries wrote the same file names, so that one set was lost."""
    large = [{"x": torch.rand(1, 16, 12), "y": torch.rand(1, 16, 12)} for _ in range(2)]
    loaders = [loader, DataLoader(large, batch_size=2), loader]
    trainer = run(tmp_path, loader, model=Several(), val=loaders, every_n_epochs=4)
    names = sorted(path.name for path in (tmp_path / "gallery").iterdir())
    sizes = ("16x12", "8_loader0", "8_loader2")
    assert names == [f"{when}_{size}.png" for when in ("epoch_0003", "final") for size in sizes]
    trainer.test(Several(), loaders[:2], verbose=False)
    assert (tmp_path / "gallery" / "test_8.png").is_file()
    assert (tmp_path / "gallery" / "test_16x12.png").is_file()
    assert not (tmp_path / "gallery" / "test_8_loader2.png").exists()


@pytest.mark.slow
def test_picture_of_a_test(tmp_path, loader, capsys):
    trainer = run(tmp_path, loader)
    capsys.readouterr()
    trainer.test(Scale(), loader, verbose=False)
    assert (tmp_path / "gallery" / "test_8.png").is_file()
    assert "gallery" not in capsys.readouterr().out  # the path was printed at the end of fit


@pytest.mark.slow
@pytest.mark.parametrize("way", ["add_figure", "log_image"])
def test_loggers_that_take_images_get_them(tmp_path, loader, way):
    logger = Images(way)
    run(tmp_path, loader, logger=logger, every_n_epochs=4)
    assert logger.received.call_count == 2  # the fourth epoch and the end


def test_says_what_a_step_must_return(tmp_path, loader):
    with pytest.raises(ValueError, match=r"dict with x, y and prediction; got \['prediction'\]"):
        run(tmp_path, loader, model=Forgetful())


def test_every_sample_is_a_row(tmp_path):
    x, y, prediction = np.random.default_rng(0).random((3, 2, 16, 16))
    figure = draw_fields(x, y, prediction)
    assert len(figure.axes) == 2 * 4 * 2  # a colour bar is an axis too
    figure.savefig(tmp_path / "figure.png")
    assert imread(tmp_path / "figure.png").std() > 0
