"""Segmentation of whole volumes: on split volumes it is that of one process.

What needs MONAI is slow: each process takes several seconds to import it.
"""

import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment

import lightning_shard
from lightning_modules import SegmentationDataModule, SegmentationGallery, VolumeSegmentation
from lightning_modules.segmentation.dice import DicePerClass
from tests import training
from tests.parity import mesh_of
from tests.trainer.featured import QUIET, assert_same_metrics, assert_same_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    # without validation samples there is no loader
    pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero"),
    pytest.mark.filterwarnings("ignore:`on_.*epoch_end` is defined"),
]
SMALL = {"filters": [2, 4, 4, 6], "strides": [1, 2, (2, 2, 1), 2], "deep_supervision": 2}
VOLUMES = {"extents": (19, 14, 9), "num_val": 2, "num_test": 2, "noise": 0.1}


def network(dtype=torch.float64, **options):
    torch.manual_seed(3)
    module = VolumeSegmentation(**(SMALL | options))
    module.configure_model()
    return module.to(dtype)


def data(batch_size, dtype=torch.float64, **options):
    """Volumes in their order: replicas of one process see the same ones in a step."""
    made = SegmentationDataModule(batch_size=batch_size, **(VOLUMES | options))
    made.train_dataloader = lambda: made._loader("train")
    made.on_after_batch_transfer = lambda batch, _: batch | {"image": batch["image"].to(dtype)}
    return made


def alone(**options):
    return Trainer(devices=1, plugins=LightningEnvironment(), **(QUIET | options))


def trained_alone(steps, seed=0):
    """Of every rank by itself: a metric waits for the ranks of its group, whatever the strategy."""
    losses, module = training.Losses(), network()
    runner = alone(callbacks=[losses])
    runner.fit(module, datamodule=data(2, num_train=2 * steps, seed=seed))
    return losses.values, module.state_dict(), runner.callback_metrics


def trained_split(steps, domain, shard_dims=None, **options):
    losses, module = training.Losses(), network()
    replicas = dist.get_world_size() // torch.Size(domain).numel()
    runner = training.trainer(domain, strategy={"shard_dims": shard_dims}, callbacks=[losses])
    runner.fit(module, datamodule=data(2 // replicas, num_train=2 * steps, **options))
    mean = torch.tensor(losses.values, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist(), module, runner


def assert_training_is_that_of_one_process(steps, domain, shard_dims=None):
    expected, state, metrics = trained_alone(steps)
    found, module, runner = trained_split(steps, domain, shard_dims)
    assert len(found) == steps
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=1e-10)
    assert_same_state(module, state)
    runner.callback_metrics.pop("train/loss_step")  # of a rank
    assert_same_metrics(runner, {k: v for k, v in metrics.items() if k != "train/loss_step"})


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("domain", "dims"),
    [
        pytest.param((2,), None, id="2 replicas of 2"),
        pytest.param((2, 2), {"image": [2, 3], "label": [2, 3]}, id="2 x 2"),
    ],
)
def test_twenty_steps_on_four_ranks_are_those_of_one_process(domain, dims):
    assert_training_is_that_of_one_process(20, domain, dims)


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_twenty_steps_on_three_ranks_are_those_of_one_process():
    assert_training_is_that_of_one_process(20, (3,), {"image": 2, "label": 2})


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_two_steps_on_two_ranks_are_those_of_one_process():
    assert_training_is_that_of_one_process(2, (2,))


def logits_of(module, image, mesh):
    module.eval()
    with torch.inference_mode():
        expected = module(image)
        with lightning_shard.split_inputs(module, mesh):
            return module(image), expected


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("shape", [(2, 1, 19, 14, 9), (1, 1, 8, 8, 5), (1, 1, 3, 2, 2)])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=["4", "2x2"])
def test_logits_of_whole_volumes(mesh, shape):
    """Also where the coarsest level has fewer rows than there are ranks."""
    image = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, expected = logits_of(network(), image, mesh_of(*mesh))
    assert found.shape == (shape[0], 4, *shape[2:])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    if shape[0] == 2:  # the volumes of a batch do not depend on each other
        single = network().eval()(image[1:])
        torch.testing.assert_close(found[1:], single, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.spmd(3)
@pytest.mark.parametrize("vary", [0, 4])
def test_predictions_of_the_trainer(vary):
    predicted = training.trainer((3,)).predict(network(), datamodule=data(1, vary=vary))
    expected = alone().predict(network(), datamodule=data(1, vary=vary))
    for found, wanted in zip(predicted, expected, strict=True):
        assert wanted.dtype == torch.uint8
        assert lightning_shard.gather(found).equal(wanted)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_the_test_of_a_split_run_draws_its_volumes():
    options = {"default_root_dir": training.shared_path("logs")}
    runner = training.trainer((2,), callbacks=[SegmentationGallery()], **options)
    runner.test(network(), datamodule=data(1), verbose=False)
    expected = alone()
    expected.test(network(), datamodule=data(1), verbose=False)
    assert_same_metrics(runner, expected)
    dist.barrier()
    assert (options["default_root_dir"] / "gallery/segmentation.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_mixed_precision_learns():
    """In bfloat16 the loss is that of float32 to 2 %."""
    losses = training.Losses()
    runner = training.trainer((2,), callbacks=[losses], precision="bf16-mixed")
    runner.fit(network(torch.float32), datamodule=data(2, torch.float32, num_train=20))
    reference = training.Losses()
    alone(callbacks=[reference]).fit(network(), datamodule=data(2, num_train=20))
    assert losses.values == pytest.approx(reference.values, rel=2e-2)
    assert losses.values[-1] < losses.values[0]


def test_dice():
    dice = DicePerClass(4)
    true = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 1]]).reshape(2, 1, 1, 4)
    found = torch.tensor([[0, 1, 2, 2], [0, 2, 1, 1]]).reshape(2, 1, 1, 4)
    dice.update(found, true)
    wanted = [(1 + 2 / 3) / 2, (2 / 3 + 1) / 2, (2 / 3 + 0) / 2]
    assert dice.compute()[:3].tolist() == pytest.approx(wanted)
    assert dice.compute()[3].isnan()  # neither predicted nor true


@pytest.mark.slow
def test_a_volume_without_a_class_has_a_loss_and_a_gradient():
    module = network().train()
    image = torch.randn(1, 1, 16, 16, 8, dtype=torch.float64)
    loss = module.loss(module(image)[:, 0], torch.zeros(1, 1, 16, 16, 8, dtype=torch.int64))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.slow
def test_labels_without_a_name():
    made = data(1, num_train=1)
    with pytest.raises(ValueError, match=r"from 0 to 1, for the 2 classes air, body; got 0 to 3"):
        alone().fit(network(classes=["air", "body"]), datamodule=made)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classes": ["organ"]}, "classes must name the background and one class or more"),
        (
            {"strides": [1, 2]},
            r"for the same levels, three or more, .*; got filters \[2, 4, 4, 6\]",
        ),
        ({"deep_supervision": 3}, "deep_supervision must be from 0 to 2, since the network has 4"),
    ],
)
def test_levels_that_do_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        VolumeSegmentation(**(SMALL | options))


def test_without_monai():
    hidden = {name: None for name in sys.modules if name.startswith("monai.")}
    with (
        mock.patch.dict(sys.modules, hidden | {"monai": None}),
        pytest.raises(ModuleNotFoundError, match=r"VolumeSegmentation needs the package 'monai', "
                      r"which is not installed; pip install 'lightning-shard\[segmentation\]'"),
    ):  # fmt: skip
        VolumeSegmentation()
