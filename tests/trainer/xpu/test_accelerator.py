"""XPUAccelerator and the choice of its collectives, with a torch.xpu patched."""

import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_shard import HybridShardStrategy, XPUAccelerator
from lightning_shard.processes.device import ONECCL, default_backend
from lightning_shard.trainer.precision import ShardedGradScaler
from lightning_shard.trainer.random_state import random_state, set_random_state, storable
from lightning_shard.trainer.xpu.random_isolation import (
    IsolatedSanityCheck,
    isolate_random_numbers,
)

XPU = torch.device("xpu", 0)
# lightning makes a scaler for CUDA, which disables itself
no_cuda = pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not:UserWarning")


@pytest.fixture
def two_gpus(monkeypatch):
    """torch.xpu answers as if there were two devices; calls are recorded, no tensor is on them."""
    fake = mock.Mock(wraps=torch.xpu)
    fake.device_count.side_effect = lambda: 2
    fake.is_available.side_effect = lambda: True
    fake.memory_stats.side_effect = lambda device: {"allocated_bytes.all.current": 512}
    fake.mem_get_info.side_effect = lambda device: (1000, 4000)
    fake.utilization = mock.Mock(side_effect=lambda device: 75)  # not in torch 2.11
    fake.set_device.side_effect = fake.empty_cache.side_effect = lambda *_: None
    monkeypatch.setattr(torch, "xpu", fake)
    uncached = torch.get_device_module.__wrapped__  # which would remember the first torch.xpu
    monkeypatch.setattr(torch, "get_device_module", uncached)
    return fake


def xpu_trainer(**options):
    return Trainer(
        accelerator="xpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


def test_its_name_is_registered_unless_taken():
    assert AcceleratorRegistry["xpu"]["accelerator"] is XPUAccelerator
    with mock.patch.dict(AcceleratorRegistry, {"xpu": {"accelerator": "of another package"}}):
        XPUAccelerator.register()
        assert AcceleratorRegistry["xpu"]["accelerator"] == "of another package"


def test_a_package_that_comes_later_takes_its_name():
    with mock.patch.dict(AcceleratorRegistry):
        AcceleratorRegistry.register("xpu", CPUAccelerator, description="of another package")
        assert AcceleratorRegistry["xpu"]["accelerator"] is CPUAccelerator
        with pytest.raises(MisconfigurationException, match="already present"):
            AcceleratorRegistry.register("xpu", CPUAccelerator)
    assert AcceleratorRegistry["xpu"]["accelerator"] is XPUAccelerator


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        ("auto", [0, 1]), (-1, [0, 1]), ("-1", [0, 1]), (2, [0, 1]), ("2", [0, 1]), (1, [0]),
        ([0, 1], [0, 1]), ([1], [1]), ((1, 0), [1, 0]), ("0,1", [0, 1]), ("1,", [1]),
        (" 1, 0", [1, 0]),
    ],
)  # fmt: skip
def test_devices(two_gpus, devices, indices):
    assert XPUAccelerator.parse_devices(devices) == indices
    found = XPUAccelerator.get_parallel_devices(indices)
    assert found == [torch.device("xpu", index) for index in indices]


@pytest.mark.parametrize(
    "devices", [0, -2, "", "two", "0,x", [0, 0], [], [0.5], [True], None, True]
)
def test_devices_that_are_none(two_gpus, devices):
    with pytest.raises(MisconfigurationException, match="devices must be 'auto', -1, a number"):
        XPUAccelerator.parse_devices(devices)


@pytest.mark.parametrize("devices", [3, [0, 2], "1,2", [-1]])
def test_devices_that_are_not_there(two_gpus, monkeypatch, devices):
    monkeypatch.setenv("ZE_AFFINITY_MASK", "4,5")
    sentence = (
        r"but 2 are visible \(ZE_AFFINITY_MASK=4,5\); use at most 2, with indices from 0 to 1"
    )
    with pytest.raises(MisconfigurationException, match=sentence):
        XPUAccelerator.parse_devices(devices)


def test_without_a_device():
    assert not XPUAccelerator.is_available()
    with pytest.raises(MisconfigurationException, match="`XPUAccelerator` can not run on your sys"):
        xpu_trainer(devices=1)


def test_auto_in_an_interactive_session(two_gpus, monkeypatch):
    assert XPUAccelerator.auto_device_count() == 2
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert XPUAccelerator.auto_device_count() == 1
    two_gpus.device_count.side_effect = lambda: 0
    assert XPUAccelerator.auto_device_count() == 0


def test_statistics_of_a_device(two_gpus):
    stats = XPUAccelerator().get_device_stats(XPU)
    assert stats == {
        "allocated_bytes.all.current": 512,
        "free_bytes": 1000,
        "total_bytes": 4000,
        "utilization_percent": 75,
    }
    two_gpus.utilization.side_effect = ImportError("pyzes is not installed")
    two_gpus.mem_get_info.side_effect = RuntimeError("The device does not support it")
    assert XPUAccelerator().get_device_stats(XPU) == {"allocated_bytes.all.current": 512}
    del two_gpus.utilization  # of an older torch
    assert XPUAccelerator().get_device_stats(XPU) == {"allocated_bytes.all.current": 512}


def test_set_up_and_torn_down(two_gpus):
    XPUAccelerator().setup_device(torch.device("xpu", 1))
    two_gpus.set_device.assert_called_once_with(torch.device("xpu", 1))
    XPUAccelerator().teardown()
    two_gpus.empty_cache.assert_called_once_with()


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_strategies_of_lightning_are_refused(two_gpus, strategy):
    """They would train on the CPU, or with a stream of CUDA."""
    trainer = xpu_trainer(devices=[1], strategy=strategy)
    words = r"does not train .* strategy='hybrid_shard'"
    with pytest.raises(MisconfigurationException, match=words):
        XPUAccelerator().setup(trainer)


def test_one_device_with_this_strategy(two_gpus):
    for strategy in ("hybrid_shard", HybridShardStrategy()):
        trainer = xpu_trainer(devices=1, strategy=strategy)
        assert trainer.strategy.root_device == XPU
        assert isinstance(trainer.accelerator, XPUAccelerator)


def test_auto_takes_the_accelerator_of_the_strategy(two_gpus):
    strategy = HybridShardStrategy(accelerator=XPUAccelerator())
    trainer = Trainer(accelerator="auto", devices=1, strategy=strategy, logger=False)
    assert trainer.strategy.root_device == XPU


@no_cuda
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_autocast_is_of_the_device(two_gpus, precision):
    trainer = xpu_trainer(devices=1, strategy="hybrid_shard", precision=precision)
    plugin = trainer.precision_plugin
    assert isinstance(plugin, MixedPrecision)
    XPUAccelerator().setup(trainer)
    assert plugin.device == "xpu"
    if precision == "16-mixed":
        scaler = plugin.scaler
        assert isinstance(scaler, ShardedGradScaler)
        assert scaler.is_enabled()
        assert scaler.device_type == "xpu"
        XPUAccelerator().setup(trainer)  # of a second call of fit
        assert plugin.scaler is scaler
    with mock.patch("torch.autocast") as autocast, plugin.forward_context():
        pass
    assert autocast.call_args.args == ("xpu",)
    assert autocast.call_args.kwargs["dtype"] == (
        torch.bfloat16 if precision == "bf16-mixed" else torch.half
    )


def test_xccl_comes_first(monkeypatch):
    monkeypatch.setattr(dist, "is_xccl_available", lambda: True)
    assert default_backend(XPU) == "xccl"
    assert default_backend(torch.device("cpu")) == "gloo"
    assert default_backend(torch.device("cuda", 0)) == "nccl"


def test_oneccl_bindings_where_torch_has_no_xccl(monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "is_xccl_available", lambda: False)
    with pytest.raises(RuntimeError, match=f"training on xpu:0 needs .* or the package {ONECCL}"):
        default_backend(XPU)
    (tmp_path / f"{ONECCL}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert ONECCL not in sys.modules
    assert default_backend(XPU) == "ccl"
    assert sys.modules.pop(ONECCL).__file__ == str(tmp_path / f"{ONECCL}.py")


def test_the_strategy_asks_for_it(two_gpus):
    """And not where the user named one."""
    for given, wanted in ((None, "xccl"), ("gloo", "gloo")):
        strategy = HybridShardStrategy(process_group_backend=given)
        trainer = xpu_trainer(devices=1, strategy=strategy)
        strategy.connect(BoringModel())
        started = RuntimeError("the group would be made here")
        with (
            mock.patch("lightning_shard.trainer.process_mesh.default_backend", return_value="xccl"),
            mock.patch("lightning_shard.trainer.process_mesh.join", side_effect=started) as join,
            pytest.raises(RuntimeError, match="would be made here"),
        ):
            trainer.strategy.setup_environment()
        assert join.call_args.kwargs["device"] == XPU
        assert join.call_args.kwargs["backend"] == wanted


def test_an_intel_gpu_that_is_not_used_is_told(two_gpus):
    """Lightning's "auto" does not know it, and a strategy cannot tell "auto" from "cpu"."""
    trainer = Trainer(accelerator="auto", devices=1, strategy="hybrid_shard", logger=False)
    assert trainer.strategy.root_device == torch.device("cpu")
    trainer.strategy.connect(BoringModel())
    with (
        mock.patch("lightning_shard.trainer.process_mesh.join", side_effect=KeyError),
        pytest.warns(PossibleUserWarning, match="An Intel GPU is available but not used"),
        pytest.raises(KeyError),
    ):
        trainer.strategy.setup_environment()


@pytest.fixture
def generator(two_gpus):
    """What stands for the generator of the first device."""
    numbers = torch.Generator().manual_seed(3)
    two_gpus.get_rng_state.side_effect = lambda device: numbers.get_state()
    two_gpus.set_rng_state.side_effect = lambda state, device: numbers.set_state(state)
    return numbers


def test_random_state_has_that_of_the_device(two_gpus, generator, tmp_path):
    torch.save(storable(random_state(XPU)), tmp_path / "state.pt")
    wanted = torch.rand(3, generator=generator)
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True), XPU)
    assert torch.equal(torch.rand(3, generator=generator), wanted)
    two_gpus.get_rng_state.assert_called_once_with(XPU)
    assert two_gpus.set_rng_state.call_args.args[1] == XPU


def test_the_sanity_check_leaves_no_trace_in_the_numbers_of_the_device(generator):
    """Lightning's isolate_rng keeps the generators of the CPU and of CUDA only."""
    trainer = xpu_trainer(devices=1, strategy="hybrid_shard")
    isolate_random_numbers(trainer, XPU)
    isolate_random_numbers(trainer, XPU)
    (isolated,) = [c for c in trainer.callbacks if isinstance(c, IsolatedSanityCheck)]
    wanted = torch.rand(3, generator=generator.clone_state())
    isolated.on_sanity_check_start(trainer, BoringModel())
    torch.rand(3, generator=generator)
    isolated.on_sanity_check_end(trainer, BoringModel())
    assert torch.equal(torch.rand(3, generator=generator), wanted)
