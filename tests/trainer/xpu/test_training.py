"""The strategy on Intel GPUs, fake ones (tests/fake_xpu): training equals that on the CPU."""

import pytest
import torch
from lightning.pytorch import Callback

from tests.trainer.featured import (
    Featured,
    assert_same_metrics,
    assert_same_state,
    fit_alone,
    fit_sharded,
)
from tests.trainer.test_exactness import check

meshes = pytest.mark.parametrize("domain", [(1,), (2,)], ids=["2x1", "1x2"])
FLOAT64, FLOAT32 = torch.float64, torch.float32
SLOW = pytest.mark.slow


class EverythingIsThere(Callback):
    """Each batch, parameter, gradient, buffer, state of an optimizer and loss is on this rank's."""

    def __init__(self) -> None:
        self.seen = 0

    def look(self, *tensors):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                assert tensor.device == torch.device("xpu", torch.xpu.current_device())
                self.seen += 1

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        assert module.device == trainer.strategy.root_device
        self.look(*batch.values())

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.look(*(p.grad for p in module.parameters()))

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.look(outputs["loss"], *module.parameters(), *module.buffers())
        for state in trainer.optimizers[0].state.values():
            self.look(*state.values())


def check_features(domain, **options):
    module, expected, place = Featured(), Featured(), EverythingIsThere()
    mine = fit_sharded(module, domain, callbacks=[place], **options)
    theirs = fit_alone(expected)
    assert place.seen > 6 * 3 * len(list(module.parameters()))  # of each step
    assert mine.strategy.root_device.type == "xpu"
    assert_same_state(module, expected)
    assert_same_metrics(mine, theirs)


@pytest.mark.spmd(1, "xpu")
@pytest.mark.parametrize("name", ["mnist", pytest.param("dense_fno", marks=SLOW)])
def test_one_device(name):
    check(name, (1,), FLOAT32)


@pytest.mark.spmd(1, "xpu")
def test_one_device_with_metrics():
    check_features((1,))


@pytest.mark.quick_rows("dense_fno-dtype0-2x1")
@pytest.mark.spmd(2, "xpu")
@meshes
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("dense_fno", FLOAT64), pytest.param("dense_fno", FLOAT32, marks=SLOW),
        pytest.param("mnist", FLOAT64, marks=SLOW), pytest.param("mnist", FLOAT32, marks=SLOW),
        pytest.param("tfno", FLOAT64, marks=SLOW), pytest.param("tfno", FLOAT32, marks=SLOW),
        pytest.param("simple_cnn", FLOAT64, marks=SLOW),
        pytest.param("simple_cnn", FLOAT32, marks=SLOW),
    ],
)  # fmt: skip
def test_two_devices(name, dtype, domain):
    check(name, domain, dtype)


@pytest.mark.quick_rows("{'strategy': {'activation_checkpointing': ['Conv2d']}}-2x1")
@pytest.mark.spmd(2, "xpu")
@meshes
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"strategy": {"sharding": "gradients"}}, marks=SLOW),
        pytest.param({"strategy": {"sharding": "none"}}, marks=SLOW),
        {"strategy": {"activation_checkpointing": ["Conv2d"]}},
        pytest.param({"strategy": {"prefetch": 2, "wrap": ["Conv2d"]}}, marks=SLOW),
    ],
    ids=str,
)
def test_two_devices_with_metrics(domain, options):
    check_features(domain, **options)


@pytest.mark.spmd(2, "xpu")
@pytest.mark.parametrize("domain", [pytest.param((1,), marks=SLOW), (2,)], ids=["2x1", "1x2"])
def test_accumulation_and_clipping(domain):
    check("dense_fno", domain, FLOAT64, accumulate=2, clip=0.05)
