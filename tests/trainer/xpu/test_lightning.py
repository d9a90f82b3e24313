"""Lightning 2.6's traps on Intel GPUs, on fake ones: strategies, precision, random numbers."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.trainer.precision import ShardedGradScaler
from tests.trainer.featured import (
    BATCH,
    QUIET,
    Featured,
    fit_alone,
    loader,
    sample,
)
from tests.trainer.xpu.test_training import EverythingIsThere
from tests.training import Fields


def trainer(**options):
    given = {"accelerator": "xpu", "devices": dist.get_world_size(), "strategy": "hybrid_shard"}
    return Trainer(**(QUIET | given | {"plugins": TorchElasticEnvironment()} | options))


def fit(module=None, **options):
    runner = trainer(**options)
    runner.fit(module or Featured(), loader(BATCH // runner.world_size), loader(BATCH))
    return runner


@pytest.mark.spmd(1, "xpu")
def test_strategies_of_lightning_are_refused():
    class Elsewhere(SingleDeviceStrategy):
        pass

    words = r"does not train on Intel GPUs .* strategy='hybrid_shard'"
    with pytest.raises(MisconfigurationException, match=words):
        fit(strategy="ddp")
    for strategy in ("auto", Elsewhere("cpu")):
        with pytest.raises(MisconfigurationException, match=words):
            fit(strategy=strategy, plugins=LightningEnvironment())


class Mixed(LightningModule):
    """Notes what a linear layer returns, and which autocast there is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(7, 3)
        self.seen = set()

    def training_step(self, batch, batch_idx):
        out = self.linear(batch["x"].float())
        under = (torch.is_autocast_enabled("xpu"), torch.is_autocast_enabled("cuda"))
        self.seen.add((out.dtype, *under))
        return out.float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)]
)
@pytest.mark.spmd(2, "xpu")
def test_autocast(precision, dtype):
    module, expected = Mixed(), Mixed()
    runner = fit(module, precision=precision)
    assert module.seen == {(dtype, True, False)}
    scaler = getattr(runner.precision_plugin, "scaler", None)
    if precision == "16-mixed":
        assert isinstance(scaler, ShardedGradScaler)
        assert scaler.get_scale() == 65536.0
        assert scaler._scale.device.type == "xpu"
    fit_alone(expected)
    for key, value in full_module_state(module).items():
        torch.testing.assert_close(value, expected.state_dict()[key], rtol=2e-2, atol=2e-2)


class Noisy(Featured):
    """Draws on the device in each step; validation, too."""

    learning_rate = 0.05

    def training_step(self, batch, batch_idx):
        noise = torch.rand(3, device=self.device, dtype=torch.float64)
        self.drawn = [*getattr(self, "drawn", []), noise.cpu()]
        return super().training_step(batch, batch_idx) + 0 * noise.sum()

    def validation_step(self, batch, batch_idx):
        torch.rand(5, device=self.device)
        return super().validation_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def drawn(*callbacks, **options):
    torch.xpu.manual_seed_all(11)
    module = Noisy()
    fit(module, callbacks=[*callbacks], **options)
    return torch.stack(module.drawn[-6:])


@pytest.mark.spmd(2, "xpu")
def test_sanity_check_and_learning_rate_finder_leave_no_trace(tmp_path):
    alone = drawn(num_sanity_val_steps=0)
    assert alone.shape == (6, 3)
    assert torch.equal(drawn(num_sanity_val_steps=2), alone)
    finder = LearningRateFinder(num_training_steps=3, update_attr=True)
    found = drawn(finder, num_sanity_val_steps=0, default_root_dir=tmp_path)
    assert torch.equal(found, alone)


@pytest.mark.spmd(1, "xpu")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_are_pinned_for_the_xpu_and_moved(pin_memory):
    class Look(Featured):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            assert batch["x"].is_pinned() == pin_memory
            return batch

    place = EverythingIsThere()
    runner = trainer(callbacks=[place])
    runner.fit(Look(), DataLoader(Fields(sample, 4), 2, pin_memory=pin_memory))
    assert place.seen
