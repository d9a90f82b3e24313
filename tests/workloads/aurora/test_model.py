"""Aurora's fine-tuning: it is that of one process, and it forecasts better than nothing changes."""

from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_modules import AuroraDataModule, AuroraForecast
from lightning_shard.checkpoint.state import full_module_state
from tests import training
from tests.trainer.featured import QUIET, assert_same_state

aurora = pytest.importorskip("aurora", reason="microsoft-aurora is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    # without validation samples there is no loader
    pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero"),
]
SMALL = {
    "embed_dim": 16, "num_heads": 4, "encoder_depths": [2, 2], "encoder_num_heads": [2, 4],
    "decoder_depths": [2, 2], "decoder_num_heads": [4, 2], "window_size": [2, 3, 4],
}  # fmt: skip
SIZES = {"resolution": (29, 24), "levels": (500, 850), "num_val": 0, "num_test": 2}
STEPS = 20


def forecast(dtype=torch.float32, **options):
    torch.manual_seed(3)
    module = AuroraForecast(options=SMALL | options.pop("options", {}), **options)
    module.configure_model()
    with torch.no_grad():  # at first Aurora's blocks give nothing, and no adapter has a gradient
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return module.to(dtype)


def data(batch_size, samples, **options):
    """Windows in their order: replicas of one process see the same samples in a step."""
    made = AuroraDataModule(batch_size=batch_size, num_train=samples, **(SIZES | options))
    made.train_dataloader = lambda: made._loader("train")
    return made


def trained_alone(module, samples, epochs=1):
    losses = training.Losses()
    options = QUIET | {"max_epochs": epochs, "callbacks": [losses]}
    runner = Trainer(devices=1, plugins=LightningEnvironment(), **options)
    runner.fit(module, datamodule=data(2, samples))
    return losses.values


def trained_split(module, samples, domain, shard_dims):
    losses = training.Losses()
    replicas = torch.distributed.get_world_size() // torch.Size(domain).numel()
    strategy = {"shard_dims": shard_dims}
    runner = training.trainer(domain, strategy=strategy, callbacks=[losses])
    made = data(2 // replicas, samples)
    runner.fit(module, datamodule=made)
    mean = torch.tensor(losses.values, dtype=torch.float64)
    torch.distributed.all_reduce(mean)
    return (mean / torch.distributed.get_world_size()).tolist()


def in_float64():
    """Aurora gives forecasts in float32 whatever its weights are."""
    return mock.patch.object(aurora.Batch, "type", lambda self, _: self._fmap(torch.Tensor.double))


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("domain", "dims"),
    [
        pytest.param((2,), -2, id="2 replicas of 2"),
        pytest.param((2, 2), [-2, -1], id="2 x 2", marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_on_four_ranks_are_those_of_one_process(domain, dims):
    with in_float64():
        alone, module = forecast(torch.float64), forecast(torch.float64)
        expected = trained_alone(alone, 2 * STEPS)
        found = trained_split(module, 2 * STEPS, domain, dims)
    assert len(found) == STEPS
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=1e-10)
    assert_same_state(module, alone)


@pytest.mark.spmd(2)
def test_a_resumed_run_goes_on_in_float32():
    """Adapters only."""
    options = {"options": {"use_lora": True, "lora_mode": "all"}, "adapters_only": True}
    whole, first, second = (forecast(**options) for _ in range(3))
    expected = trained_alone(whole, 4, epochs=2)
    path = training.shared_path("half.ckpt")
    strategy = {"shard_dims": {"surf_vars": -2, "atmos_vars": -2, "static_vars": -2}}
    runner = training.trainer((2,), strategy=strategy)
    runner.fit(first, datamodule=data(2, 4))
    runner.save_checkpoint(path)
    losses = training.Losses()
    runner = training.trainer((2,), strategy=strategy, callbacks=[losses], max_epochs=2)
    runner.fit(second, datamodule=data(2, 4), ckpt_path=path)
    assert losses.values == pytest.approx(expected[2:], rel=1e-5)
    for key, value in full_module_state(second).items():
        torch.testing.assert_close(value, whole.state_dict()[key], rtol=1e-3, atol=1e-5)


def test_adapters_only_changes_adapters_alone():
    module = forecast(options={"use_lora": True}, adapters_only=True)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trained_alone(module, 4)
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    with pytest.raises(ValueError, match="adapters_only needs a network with adapters"):
        forecast(adapters_only=True)


def test_evaluation_and_prediction():
    module, made = forecast(), data(1, 2)
    runner = Trainer(devices=1, plugins=LightningEnvironment(), **QUIET)
    (metrics,) = runner.test(module, datamodule=made, verbose=False)
    assert {"test/loss", "test/loss_persistence", "test/rmse_2t", "test/rmse_msl"} <= set(metrics)
    predicted = runner.predict(module, datamodule=made)
    assert predicted[0]["surf.2t"].shape == (1, 2, 28, 24)
    assert predicted[0]["atmos.q"].shape == (1, 2, 2, 28, 24)
    truth = made.datasets["test"].collate([made.datasets["test"][0]])
    error = predicted[0]["surf.2t"][:, 1] - truth.surf_vars["2t"][:, 3, :-1]
    area = truth.metadata.lat[:-1].deg2rad().cos()[:, None]
    expected = (error.square() * area / area.mean()).mean().sqrt()
    runner.test(module, datamodule=data(1, 2, num_test=1), verbose=False)
    assert float(runner.callback_metrics["test/rmse_2t"]) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"network": "AuroraSmal"}, "Aurora has no network 'AuroraSmal'; use AuroraSmall."),
        ({"options": {"embed_dims": 16}}, "has no option 'embed_dims'; use embed_dim."),
    ],
)
def test_a_typo_is_named(options, words):
    with pytest.raises(ValueError, match=words):
        AuroraForecast(**options)


def test_weights_that_are_not_there():
    with pytest.raises(FileNotFoundError, match=r"weights nowhere\.ckpt does not exist"):
        AuroraForecast(options=SMALL, weights="nowhere.ckpt").configure_model()
