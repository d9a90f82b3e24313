"""Lightning 2.6's traps on Intel GPUs, on fake ones: each strategy trains there, and as the CPU."""

import copy

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader, DistributedSampler

from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.trainer.precision import ShardedGradScaler
from lightning_shard.trainer.xpu.strategies import SingleXPUStrategy
from tests.trainer.featured import (
    BATCH,
    QUIET,
    Featured,
    assert_same_metrics,
    assert_same_state,
    fit_alone,
    loader,
    sample,
)
from tests.trainer.xpu.test_training import EverythingIsThere
from tests.training import Fields

STRATEGIES = ["hybrid_shard", "ddp", "auto"]  # "auto" is Lightning's for one device


def trainer(**options):
    elastic = dist.get_world_size() > 1 or options.get("strategy") in ("hybrid_shard", "ddp")
    plugins = TorchElasticEnvironment() if elastic else LightningEnvironment()
    given = {"accelerator": "xpu", "devices": dist.get_world_size(), "plugins": plugins}
    return Trainer(**(QUIET | given | options))


def fit(module=None, **options):
    runner = trainer(**options)
    batch = BATCH // runner.world_size
    module = Featured() if module is None else module
    batches = loader(batch)
    if isinstance(runner.strategy, DDPStrategy):  # for which Lightning's own sampler shuffles
        ranks, rank = runner.world_size, runner.global_rank
        order = DistributedSampler(batches.dataset, ranks, rank, shuffle=False)
        batches = DataLoader(batches.dataset, batch, sampler=order)
    runner.fit(module, batches, loader(batch))
    return runner


def per_strategy(ranks):
    """All for one device; for two those that train on two."""
    names = STRATEGIES if ranks == 1 else STRATEGIES[:2]
    return pytest.mark.parametrize("strategy", names)


def check_equals_the_cpu(strategy):
    module, place, expected = Featured(), EverythingIsThere(), Featured()
    runner = fit(module, strategy=strategy, callbacks=[place])
    alone = fit_alone(expected)
    assert place.seen
    assert_same_state(module, expected)
    assert_same_metrics(runner, alone)


@pytest.mark.spmd(1, "xpu")
@per_strategy(1)
def test_one_device_trains_as_the_cpu(strategy):
    check_equals_the_cpu(strategy)


@pytest.mark.quick_rows("ddp")
@pytest.mark.spmd(2, "xpu")
@per_strategy(2)
def test_two_devices_train_as_the_cpu(strategy):
    check_equals_the_cpu(strategy)


class Where(Featured):
    def setup(self, stage):
        self.known = self.device

    def predict_step(self, batch, batch_idx):
        assert self.weight.device == batch["x"].device
        return batch["x"].device


@pytest.mark.spmd(1, "xpu")
@pytest.mark.parametrize("strategy", ["auto", "single_xpu", "given", "of Lightning"])
def test_the_device_that_was_chosen(strategy):
    """Lightning 2.6 chooses the CPU for one device of an accelerator that it does not know."""
    given = {"given": SingleXPUStrategy("xpu:1"), "of Lightning": SingleDeviceStrategy("xpu:1")}
    runner = trainer(strategy=given.get(strategy, strategy), devices=[1], max_steps=2)
    module = Where()
    for run in range(2):
        runner.fit(module, loader(2))
        assert (module.known.type == "cpu") == (strategy == "auto" and run == 0)  # docs/devices.md
        assert runner.strategy.root_device == torch.device("xpu", 1)
        assert torch.xpu.current_device() == 1
    batches = trainer(strategy="auto", devices=[1]).predict(Where(), loader(2, 2))
    assert batches == [torch.device("xpu", 1)]
    torch.xpu.set_device(0)


@pytest.mark.spmd(1, "xpu")
def test_one_device_is_one():
    with pytest.raises(MisconfigurationException, match=r"trains on one device; got .*'xpu:1'"):
        trainer(strategy="single_xpu", devices=2)


@pytest.mark.spmd(1, "xpu")
def test_a_strategy_that_would_train_elsewhere_is_refused():
    class Elsewhere(SingleDeviceStrategy):
        pass

    with pytest.raises(MisconfigurationException, match="Elsewhere would train on 'cpu'; pass"):
        fit(strategy=Elsewhere("cpu"))


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


def check_precision(strategy, precision, dtype):
    module, expected = Mixed(), Mixed()
    runner = fit(module, strategy=strategy, precision=precision)
    assert module.seen == {(dtype, True, False)}
    scaler = getattr(runner.precision_plugin, "scaler", None)
    if precision == "16-mixed":
        assert isinstance(scaler, ShardedGradScaler)
        assert scaler.get_scale() == 65536.0
        assert scaler._scale.device.type == "xpu"
    fit_alone(expected)
    for key, value in full_module_state(module).items():
        torch.testing.assert_close(value, expected.state_dict()[key], rtol=2e-2, atol=2e-2)


precisions = pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)]
)


@pytest.mark.spmd(1, "xpu")
@precisions
@per_strategy(1)
def test_autocast_of_one_device(strategy, precision, dtype):
    check_precision(strategy, precision, dtype)


@pytest.mark.spmd(2, "xpu")
@precisions
@per_strategy(2)
def test_autocast_of_two_devices(strategy, precision, dtype):
    check_precision(strategy, precision, dtype)


@pytest.mark.spmd(2, "xpu")
def test_ddp_has_its_device_backend_and_hooks():
    """Lightning 2.6 makes a stream of CUDA there, and drops the hooks outside of CUDA."""
    calls = []

    def hook(state, bucket):
        calls.append(bucket.buffer().device)
        return bf16_compress_hook(state, bucket)

    wrapped = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, *_):
            wrapped.append(trainer.strategy.model)

    fit(strategy=DDPStrategy(ddp_comm_hook=hook), callbacks=[Look()], max_steps=2)
    rank = dist.get_rank()
    assert dist.get_backend() == "xccl"
    assert wrapped[0].device_ids == [rank]
    assert wrapped[0].device == torch.device("xpu", rank)
    assert set(calls) == {torch.device("xpu", rank)}


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


def drawn_in(strategy, *callbacks, **options):
    torch.xpu.manual_seed_all(11)
    module = Noisy()
    fit(module, strategy=strategy, callbacks=list(copy.deepcopy(callbacks)), **options)
    return torch.stack(module.drawn[-6:])


def check_random_numbers(strategy, folder):
    alone = drawn_in(strategy, num_sanity_val_steps=0)
    assert alone.shape == (6, 3)
    assert torch.equal(drawn_in(strategy, num_sanity_val_steps=2), alone)
    finder = LearningRateFinder(num_training_steps=3, update_attr=True)
    found = drawn_in(strategy, finder, num_sanity_val_steps=0, default_root_dir=folder)
    assert torch.equal(found, alone)


@pytest.mark.spmd(1, "xpu")
@per_strategy(1)
def test_sanity_check_and_learning_rate_finder_leave_no_trace(strategy, tmp_path):
    check_random_numbers(strategy, tmp_path)


@pytest.mark.quick_rows("ddp")
@pytest.mark.spmd(2, "xpu")
@per_strategy(2)
def test_sanity_check_and_learning_rate_finder_leave_no_trace_on_two(strategy, tmp_path):
    check_random_numbers(strategy, tmp_path)


@pytest.mark.spmd(1, "xpu")
@pytest.mark.parametrize("pin_memory", [False, True])
@per_strategy(1)
def test_batches_are_pinned_for_the_xpu_and_moved(strategy, pin_memory):
    class Look(Featured):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            assert batch["x"].is_pinned() == pin_memory
            return batch

    place = EverythingIsThere()
    runner = trainer(strategy=strategy, callbacks=[place])
    runner.fit(Look(), DataLoader(Fields(sample, 4), 2, pin_memory=pin_memory))
    assert place.seen
