import struct

import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from torch.optim import SGD, Adadelta, Adam
from torch.optim.lr_scheduler import StepLR

from lightning_modules import MNISTDataModule, MNISTModule, MNISTNet, SaveWeights
from lightning_shard.checkpoint.state import full_module_state
from tests import training

pytestmark = [
    # reading a data set of 2000 small images needs no worker processes
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # two steps are fewer than the logging interval
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


@pytest.fixture
def trainer(tmp_path):
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=1,
        limit_test_batches=1,
        limit_predict_batches=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )


@pytest.fixture
def idx_root(tmp_path):
    """A tiny MNIST in the IDX format: image i is filled with i, its label is i % 10."""
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, size in (("train", 20), ("t10k", 8)):
        pixels = bytes(i for i in range(size) for _ in range(28 * 28))
        images = struct.pack(">4i", 0x803, size, 28, 28) + pixels
        labels = struct.pack(">2i", 0x801, size) + bytes(i % 10 for i in range(size))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    return tmp_path


def _filled(data):
    data.setup("fit")
    return data


def test_network_has_the_sizes_of_the_pytorch_example():
    network = MNISTNet().eval()
    log_probabilities = network(torch.rand(3, 1, 28, 28))
    assert log_probabilities.shape == (3, 10)
    torch.testing.assert_close(log_probabilities.exp().sum(dim=1), torch.ones(3))
    assert sum(p.numel() for p in network.parameters()) == 1_199_882
    assert (network.dropout1.p, network.dropout2.p) == (0.25, 0.5)


@pytest.mark.slow
def test_fit_test_predict_and_checkpoint_round_trip(trainer, tmp_path):
    torch.manual_seed(0)
    model, data = MNISTModule(conv_dropout=0.1), MNISTDataModule(batch_size=16)
    before = model.network.conv1.weight.detach().clone()
    trainer.fit(model, data)
    assert trainer.global_step == 2
    assert not torch.equal(before, model.network.conv1.weight)
    assert {"train/loss", "val/loss", "val/accuracy"} <= trainer.callback_metrics.keys()
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    (metrics,) = trainer.test(model, data, verbose=False)
    assert metrics.keys() == {"test/loss", "test/accuracy"}
    (predicted,) = trainer.predict(model, data)

    loaded = MNISTModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).eval()
    assert dict(loaded.hparams) == {
        "conv_dropout": 0.1,
        "linear_dropout": 0.5,
        "loss_reduction": "mean",
    }
    assert loaded.network.dropout1.p == 0.1
    images, labels = next(iter(data.predict_dataloader()))
    torch.testing.assert_close(loaded(images).argmax(dim=1), predicted)
    expected = (predicted == labels).float().mean().item()
    assert metrics["test/accuracy"] == pytest.approx(expected)


def test_accuracy_is_the_fraction_of_all_samples(trainer):
    class Constant(MNISTModule):
        def forward(self, x):
            return torch.eye(10)[3].expand(len(x), 10)  # always predicts 3

    data = _filled(MNISTDataModule(eval_batch_size=50))  # 359 samples: the last batch is short
    trainer.limit_test_batches = 1.0
    (metrics,) = trainer.test(Constant(), data, verbose=False)
    labels = data.splits["test"].tensors[1]
    assert metrics["test/accuracy"] == pytest.approx((labels == 3).float().mean().item())


def test_optimizer_and_scheduler_default_to_those_of_the_pytorch_example():
    made = MNISTModule().configure_optimizers()
    assert isinstance(made["optimizer"], Adadelta)
    assert made["optimizer"].defaults["lr"] == 1.0
    assert isinstance(made["lr_scheduler"], StepLR)
    assert (made["lr_scheduler"].step_size, made["lr_scheduler"].gamma) == (1, 0.7)


@pytest.mark.parametrize(
    ("options", "cls", "lr"),
    [
        ([], Adadelta, 1.0),
        (["--model.init_args.optimizer=torch.optim.Adam"], Adam, 1e-3),
        (
            ["--model.init_args.optimizer=torch.optim.SGD", "--model.init_args.optimizer.lr=0.3"],
            SGD,
            0.3,
        ),
    ],
    ids=["default", "other class", "other class and lr"],
)
def test_command_line_replaces_the_optimizer_without_keeping_its_rate(options, cls, lr):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    config = parser.parse_args(["--model=lightning_modules.MNISTModule", *options])
    optimizer = parser.instantiate(config).model.configure_optimizers()["optimizer"]
    assert type(optimizer) is cls
    assert optimizer.defaults["lr"] == lr


def test_digits_are_normalised_images_and_labels():
    data = _filled(MNISTDataModule())
    images, labels = next(iter(data.train_dataloader()))
    assert (images.shape, images.dtype) == ((64, 1, 28, 28), torch.float32)
    assert (labels.shape, labels.dtype) == ((64,), torch.int64)
    assert len(next(iter(data.test_dataloader()))[1]) == len(data.splits["test"])
    pixels = torch.cat([split.tensors[0] for split in data.splits.values()])
    assert len(pixels) == 1797
    assert pixels.mean().abs() < 1e-3
    assert (pixels.std() - 1).abs() < 1e-3


def test_split_is_decided_by_the_seed():
    first, again, other = (_filled(MNISTDataModule(seed=seed)).splits for seed in (1, 1, 2))
    for name in ("train", "val", "test"):
        torch.testing.assert_close(first[name].tensors, again[name].tensors, rtol=0, atol=0)
    assert not torch.equal(first["val"].tensors[1], other["val"].tensors[1])


def test_mnist_is_read_from_a_local_folder(idx_root):
    data = _filled(MNISTDataModule(source="mnist", root=idx_root, val_fraction=0.25))
    assert [len(data.splits[name]) for name in ("train", "val", "test")] == [15, 5, 8]
    images, labels = data.splits["test"].tensors
    assert (images.shape, images.dtype, labels.dtype) == (
        (8, 1, 28, 28),
        torch.float32,
        torch.int64,
    )
    torch.testing.assert_close(images[:, 0, 5, 7], (torch.arange(8) / 255 - 0.1307) / 0.3081)
    assert labels.tolist() == list(range(8))
    seen = torch.cat([data.splits[name].tensors[0][:, 0, 0, 0] for name in ("train", "val")])
    torch.testing.assert_close(seen.sort().values, (torch.arange(20) / 255 - 0.1307) / 0.3081)


def test_mnist_trains(trainer, idx_root):
    trainer.fit(MNISTModule(), MNISTDataModule(source="mnist", root=idx_root, batch_size=4))
    assert trainer.global_step == 2


def test_missing_folder_names_the_path_and_both_ways_out(tmp_path):
    data = MNISTDataModule(source="mnist", root=tmp_path / "nowhere")
    data.prepare_data()
    with pytest.raises(FileNotFoundError) as caught:
        data.setup("fit")
    message = str(caught.value)
    for part in (str(tmp_path / "nowhere"), "`download: true`", "`source: digits`"):
        assert part in message
    assert message.endswith(".")
    assert "\n" not in message


def test_incomplete_folder_names_the_missing_file(idx_root):
    (idx_root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    data = MNISTDataModule(source="mnist", root=idx_root)
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte"):
        data.setup("fit")


def test_without_held_out_samples_the_test_set_validates(idx_root):
    """As in PyTorch's example, which trains on all of the training set."""
    data = _filled(MNISTDataModule(source="mnist", root=idx_root, val_fraction=0))
    assert len(data.splits["train"]) == 20
    assert data.splits["val"].tensors[1].equal(data.splits["test"].tensors[1])
    assert len(data.val_dataloader().dataset) == 8
    assert data.val_dataloader().pin_memory == torch.accelerator.is_available()


@pytest.mark.parametrize(
    ("arguments", "got"), [({"source": "cifar"}, "'cifar'"), ({"val_fraction": 1.5}, "1.5")]
)
def test_wrong_arguments_are_refused_with_their_value(arguments, got):
    with pytest.raises(ValueError, match=f"got {got}"):
        MNISTDataModule(**arguments)


def test_a_sum_is_the_mean_times_the_samples(idx_root):
    """Gradients too, as PyTorch's tutorial of FSDP takes them; what is logged stays the mean."""
    data = _filled(MNISTDataModule(source="mnist", root=idx_root, batch_size=5))
    batch = next(iter(data.train_dataloader()))
    gradients, losses, logged = [], [], []
    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        model = MNISTModule(0.0, 0.0, loss_reduction=reduction)
        model.log = lambda name, value, **_: logged.append(value.item())
        loss = model.training_step(batch, 0)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(model.network.fc1.weight.grad)
    torch.testing.assert_close(losses[1], 5 * losses[0])
    torch.testing.assert_close(gradients[1], 5 * gradients[0])
    assert len(set(logged)) == 1


def test_another_reduction_is_refused():
    with pytest.raises(ValueError, match="must be 'mean' or 'sum'; got 'none'"):
        MNISTModule(loss_reduction="none")


@pytest.mark.spmd(2)
def test_weights_are_written_whole_when_training_ends():
    """Sharded over two ranks; without Lightning and this package the network reads them."""
    path = training.shared_path("mnist_cnn.pt")
    module = training.make("mnist", torch.float32)
    runner = training.trainer((2,), callbacks=[SaveWeights(str(path))], limit_train_batches=1)
    runner.fit(module, training.loader("mnist", torch.float32, 2, 4))
    wanted = full_module_state(module)
    dist.barrier()
    stored = torch.load(path, weights_only=True)
    MNISTNet().load_state_dict(stored)
    assert {f"network.{name}" for name in stored} == set(wanted)
    assert all(torch.equal(value, wanted[f"network.{name}"]) for name, value in stored.items())
