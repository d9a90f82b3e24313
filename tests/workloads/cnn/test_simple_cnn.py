import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.optim import AdamW

from lightning_modules import SimpleCNN, SimpleCNNModule, SyntheticImagesDataModule

pytestmark = [
    # making a few small images needs no worker processes
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # a few steps are fewer than the logging interval
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def _trainer(tmp_path, **options):
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        **options,
    )


def _small_data(**options):
    sizes = {"resolution": (16, 20), "num_train": 16, "num_val": 8, "num_test": 12, "batch_size": 8}
    return SyntheticImagesDataModule(**{**sizes, **options})


@pytest.mark.parametrize("resolution", [(13, 7), (32, 64)], ids=str)
def test_network_takes_every_resolution(resolution):
    network = SimpleCNN()
    x = torch.rand(2, 3, *resolution)
    assert sum(p.numel() for p in network.parameters()) == 618
    expected = network.fc(network.conv(x).clamp(min=0).mean(dim=(2, 3)))
    torch.testing.assert_close(network(x), expected)


def test_fit_test_predict_and_checkpoint_round_trip(tmp_path):
    model, data = SimpleCNNModule(hidden_channels=4), _small_data()
    before = model.network.conv.weight.detach().clone()
    trainer = _trainer(tmp_path, max_steps=2)
    trainer.fit(model, data)
    assert trainer.global_step == 2
    assert not torch.equal(before, model.network.conv.weight)
    assert {"train/loss", "val/loss", "val/accuracy"} <= trainer.callback_metrics.keys()
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    (metrics,) = trainer.test(model, data, verbose=False)
    predicted = torch.cat(trainer.predict(model, data))

    loaded = SimpleCNNModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).eval()
    assert dict(loaded.hparams) == {"in_channels": 3, "hidden_channels": 4, "num_classes": 10}
    images, labels = (torch.cat(part) for part in zip(*data.test_dataloader(), strict=True))
    torch.testing.assert_close(loaded(images).argmax(dim=1), predicted)
    # 12 samples in batches of 8 and 4: not the mean of the batches' accuracies
    assert metrics["test/accuracy"] == pytest.approx((predicted == labels).float().mean().item())


@pytest.mark.slow
def test_learns_wavelengths_and_keeps_them_at_another_resolution(tmp_path):
    seed_everything(0, verbose=False)
    options = {"num_classes": 3, "num_train": 192, "num_val": 3, "num_test": 60}
    model = SimpleCNNModule(num_classes=3)
    trainer = _trainer(tmp_path, max_epochs=6)
    trainer.fit(model, _small_data(resolution=(24, 32), **options))
    (metrics,) = trainer.test(model, _small_data(resolution=(48, 40), **options), verbose=False)
    assert metrics["test/accuracy"] > 0.8  # chance is 1/3


def test_images_are_decided_by_seed_and_index():
    first, again, other = (_small_data(seed=seed).splits["train"] for seed in (1, 1, 2))
    for (image, label), (image_again, label_again) in zip(first, again, strict=False):
        assert torch.equal(image, image_again)
        assert torch.equal(label, label_again)
        if label == 9:
            break
    assert not torch.equal(first[0][0], other[0][0])
    image, label = first[0]
    assert (image.shape, image.dtype) == ((3, 16, 20), torch.float32)
    assert (label.shape, label.dtype) == ((), torch.int64)


def test_splits_are_disjoint_and_balanced():
    splits = _small_data(num_train=40, num_test=20).splits
    assert [len(splits[name]) for name in ("train", "val", "test")] == [40, 8, 20]
    indices = [index for split in splits.values() for index in split.indices]
    assert indices == list(range(68))
    labels = torch.stack([splits["train"][i][1] for i in range(40)])
    assert labels.bincount().tolist() == [4] * 10


def test_wave_has_the_wavelength_of_its_class():
    split = _small_data(resolution=(1, 4096), num_classes=2, noise=0.0).splits["train"]
    for index, wavelength in ((0, 3), (1, 24)):
        spectrum = torch.fft.rfft(split[index][0][:, 0]).abs()[:, 1:]
        frequency = (spectrum.argmax(dim=1) + 1) / 4096
        assert (frequency <= 1 / wavelength + 1e-3).all()  # a slanted wave is longer along a row
        torch.testing.assert_close(frequency, frequency[:1].expand(3))


def test_command_line_replaces_the_optimizer_without_keeping_its_rate():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    name = "lightning_modules.SimpleCNNModule"
    config = parser.parse_args([f"--model={name}", "--model.init_args.optimizer=torch.optim.AdamW"])
    optimizer = parser.instantiate(config).model.configure_optimizers()
    assert type(optimizer) is AdamW
    assert optimizer.defaults["lr"] == 1e-3


def test_without_waves_there_is_nothing_to_learn():
    """As in PhysicsNeMo's tutorial: normal noise, and labels drawn at random."""
    data = _small_data(amplitude=0, noise=1.0, num_train=400)
    images, labels = (torch.stack(part) for part in zip(*data.splits["train"], strict=True))
    assert images.mean().abs() < 0.01
    assert (images.std() - 1).abs() < 0.01
    assert labels.unique().tolist() == list(range(10))
    assert labels.bincount().tolist() != [40] * 10, "drawn, not dealt out"
    assert torch.equal(labels, torch.stack([label for _, label in data.splits["train"]]))
