from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from neuralop import LpLoss

from lightning_modules import DarcyDataModule, TFNODarcy

SMALL = {"n_modes": (4, 4), "hidden_channels": 4, "n_layers": 2}

pytestmark = [
    # two loader processes would take longer to start than these tests
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


@pytest.fixture
def data(tmp_path):
    return DarcyDataModule(
        train_resolution=8, num_train=8, num_val=4, num_test=4, batch_size=4, root=str(tmp_path)
    )


@pytest.fixture
def trainer(tmp_path):
    return Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )


@pytest.mark.parametrize("loss", ["h1", "l2"])
def test_two_steps_change_every_parameter(trainer, data, loss):
    seed_everything(0, verbose=False)
    model = TFNODarcy(**SMALL, loss=loss)
    model.configure_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.fit(model, datamodule=data)
    unchanged = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == []
    assert trainer.callback_metrics["train/loss"] > 0


def test_checkpoint_round_trip(trainer, data, tmp_path):
    model = TFNODarcy(**SMALL, loss="l2")
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = TFNODarcy.load_from_checkpoint(tmp_path / "model.ckpt")
    assert loaded.hparams == model.hparams
    x = next(iter(data.test_dataloader()[1]))["x"]
    torch.testing.assert_close(loaded.eval()(x), model.eval()(x), rtol=0, atol=0)


def test_normaliser_travels_with_the_checkpoint(trainer, data, tmp_path):
    model = TFNODarcy(**SMALL)
    trainer.fit(model, datamodule=data)
    assert model.x_mean.item() == pytest.approx(data.stats.x_mean)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = TFNODarcy.load_from_checkpoint(tmp_path / "model.ckpt")
    other = DarcyDataModule(
        train_resolution=8, num_train=8, num_val=4, num_test=4, root=str(tmp_path), seed=7
    )
    trainer.test(loaded, datamodule=other, verbose=False)
    for name in ("x_mean", "x_std", "y_mean", "y_std"):
        assert getattr(loaded, name).item() == pytest.approx(getattr(data.stats, name))


def test_state_dict_holds_tensors_only():
    model = TFNODarcy(**SMALL)
    model.configure_model()
    assert all(isinstance(value, torch.Tensor) for value in model.state_dict().values())


def test_baseline(trainer, data):
    coarse, fine = trainer.test(TFNODarcy(**SMALL), datamodule=data, verbose=False)
    mean = data.train_dataloader().dataset.y.mean(0, keepdim=True)
    loaders = data.test_dataloader()
    for resolution, got, loader in zip((8, 16), (coarse, fine), loaders, strict=True):
        guess = F.interpolate(mean, size=2 * [resolution], mode="bilinear", align_corners=True)
        y = loader.dataset.y
        expected = LpLoss(d=2, reduction="mean")(guess.expand_as(y), y)
        assert got[f"test/l2_{resolution}_baseline"] == pytest.approx(expected.item())
        assert set(got) == {
            f"test/{norm}_{resolution}{suffix}"
            for norm in ("h1", "l2")
            for suffix in ("", "_baseline")
        }


def test_validation_logs_every_resolution(trainer, data):
    trainer.validate(TFNODarcy(**SMALL), datamodule=data, verbose=False)
    logged = trainer.callback_metrics
    assert {"val/loss", "val/h1_8", "val/l2_8", "val/h1_16", "val/l2_16"} <= logged.keys()
    assert logged["val/loss"] == logged["val/h1_8"]


def test_loss_does_not_depend_on_how_a_batch_is_split(data):
    data.prepare_data()
    data.setup("fit")
    model = TFNODarcy(**SMALL)
    model.configure_model()
    batch = data.train_dataloader().dataset[:8]
    halves = [{k: v[part] for k, v in batch.items()} for part in (slice(0, 4), slice(4, 8))]
    whole, *parts = (model.loss(model(b["x"]), b["y"]) for b in (batch, *halves))
    torch.testing.assert_close(whole, sum(parts) / 2)


def test_predict_returns_fields(trainer, data):
    coarse, fine = trainer.predict(TFNODarcy(**SMALL), datamodule=data)
    assert fine[0].keys() == {"x", "y", "prediction"}
    assert coarse[0]["prediction"].shape == (4, 1, 8, 8)
    assert fine[0]["prediction"].shape == fine[0]["y"].shape == (4, 1, 16, 16)


def test_optimizer_and_scheduler_are_made_from_callables():
    model = TFNODarcy(
        **SMALL,
        optimizer=partial(torch.optim.SGD, lr=0.5),
        lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1),
    )
    model.configure_model()
    made = model.configure_optimizers()
    assert isinstance(made["optimizer"], torch.optim.SGD)
    assert isinstance(made["lr_scheduler"], torch.optim.lr_scheduler.StepLR)


def test_configure_model_keeps_the_network():
    model = TFNODarcy(**SMALL)
    model.configure_model()
    network = model.network
    model.configure_model()
    assert model.network is network


def test_parameter_count_of_the_large_model():
    with torch.device("meta"):
        model = TFNODarcy(n_modes=(64, 64), hidden_channels=256, rank=0.42)
        model.configure_model()
    reals = sum(p.numel() * (2 if p.is_complex() else 1) for p in model.parameters())
    assert reals == 469_145_337


@pytest.mark.parametrize("factorization", ["tucker", "cp", "tt", "dense"])
def test_factorization(factorization):
    model = TFNODarcy(**SMALL, factorization=factorization)
    model.configure_model()
    kind = type(model.network.fno_blocks.convs[0].weight).__name__
    assert {"tucker": "Tucker", "cp": "CP", "tt": "TT", "dense": "Dense"}[factorization] in kind
    assert model(torch.rand(1, 1, 8, 8)).shape == (1, 1, 8, 8)


def test_without_positional_embedding_a_shifted_field_has_a_shifted_solution():
    x = torch.rand(1, 1, 8, 8)
    for embedding, equivariant in ((None, True), ("grid", False)):
        torch.manual_seed(0)
        model = TFNODarcy(**SMALL, positional_embedding=embedding)
        model.configure_model()
        shifted = model(x.roll(3, dims=-1)).roll(-3, dims=-1)
        assert torch.allclose(shifted, model(x), atol=1e-5) == equivariant


def test_validation_on_the_test_samples_keeps_a_best_checkpoint(tmp_path):
    data = DarcyDataModule(
        train_resolution=8,
        num_train=4,
        num_val=0,
        num_test=[4, 2],
        batch_size=4,
        root=str(tmp_path),
    )
    keep = ModelCheckpoint(dirpath=tmp_path / "kept", monitor="val/loss")
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, callbacks=[keep], enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(TFNODarcy(**SMALL), datamodule=data)
    assert Path(keep.best_model_path).is_file()
    logged = {name for name in trainer.callback_metrics if not name.endswith("_baseline")}
    assert {"val/h1_8", "val/l2_8", "val/h1_16", "val/l2_16"} <= logged
