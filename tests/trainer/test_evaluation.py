"""validate, test and predict on a mesh: metrics and predictions of one process."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard.checkpoint.state import full_module_state
from tests.pairs import choose
from tests.trainer import featured
from tests.trainer.featured import (
    Featured,
    assert_same_metrics,
    assert_same_state,
    fit_alone,
    fit_sharded,
)
from tests.training import MODELS, Fields, loader, make, trainer

SAMPLES = 6


def field_loader(batch_size, samples=SAMPLES):
    return loader("tfno", torch.float64, batch_size, samples)


def plain_errors(module, samples=SAMPLES):
    """Mean relative errors over the samples, one by one."""
    errors = []
    for batch in DataLoader(Fields(MODELS["tfno"][1], samples), 1):
        prediction = module(batch["x"])
        errors.append(torch.stack([module.errors[k](prediction, batch["y"]) for k in ("h1", "l2")]))
    return torch.stack(errors).mean(0)


@pytest.mark.quick_rows("test-2x2")
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    "domain", choose([(1,), (2,), (2, 2)], fast=[(2,)]), ids=["4x1", "2x2", "1x(2x2)"]
)
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_metrics(stage, domain):
    module = make("tfno", torch.float64)
    with torch.no_grad():
        expected = plain_errors(module, 8)
    # batches of one sample: the mean over batches is the mean over samples
    metrics = getattr(trainer(domain), stage)(module, field_loader(1, 8), verbose=False)[0]
    prefix = {"validate": "val", "test": "test"}[stage]
    found = torch.tensor([metrics[f"{prefix}/h1_11"], metrics[f"{prefix}/l2_11"]])
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-6, atol=0
    )  # Lightning logs float32


@pytest.mark.quick_rows("2x2")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(2,), (4,)], ids=["2x2", "1x4"])
def test_predictions_of_uneven_sets(domain):
    """Five samples over the data replicas: each rank of a domain holds its part of its samples."""
    module = make("tfno", torch.float64)
    with torch.no_grad():
        expected = [module(b["x"]) for b in DataLoader(Fields(MODELS["tfno"][1], 5), 1)]
    runner = trainer(domain)
    batches = runner.predict(module, field_loader(1, 5))
    sampler = runner.strategy.distributed_sampler_kwargs
    mine = list(range(sampler["rank"], 5, sampler["num_replicas"]))
    assert len(batches) == len(mine)
    for index, batch in zip(mine, batches, strict=True):
        assert isinstance(batch["prediction"], lightning_shard.DomainTensor)
        torch.testing.assert_close(
            lightning_shard.gather(batch["prediction"]), expected[index], rtol=1e-10, atol=1e-12
        )


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_validate_before_fit_and_fit_twice():
    """FSDP2 must not meet its parameters in inference mode first; a second fit goes on."""
    module = make("tfno", torch.float64)
    trainer((2,)).validate(module, field_loader(1), verbose=False)
    trainer((2,)).fit(module, field_loader(2), field_loader(1))
    first = {name: value.clone() for name, value in full_module_state(module).items()}
    trainer((2,)).fit(module, field_loader(2))
    second = full_module_state(module)
    plain = make("tfno", torch.float64)
    for _ in range(2):
        optimizer = plain.configure_optimizers()
        for step, batch in enumerate(loader("tfno", torch.float64, 2, SAMPLES)):
            optimizer.zero_grad()
            plain.training_step(batch, step).backward()
            optimizer.step()
        expected, first = first, second
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(expected[key], value, rtol=1e-9, atol=1e-11)


class ByHand(Featured):
    """Leaves gradients to the next step, and at the end to the next stage."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2 == 0:
            self.optimizers().step()
            self.zero_grad()


@pytest.mark.quick_rows("Featured-full", "ByHand-full")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["full", "none"])
@pytest.mark.parametrize("kind", [Featured, ByHand])
def test_parameters_train_in_a_second_stage(kind, sharding):
    """A scalar beside shards had the gradient of its own rank after a first stage.

    Manual steps with shards ended in torch's "mixed torch.Tensor and DTensor".
    """
    alone, module = kind(), kind()
    for _ in range(2):
        fit_alone(alone)
        fit_sharded(module, (2,), strategy={"sharding": sharding})
        assert_same_state(module, alone)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_replicas_are_tested_with_the_statistics_of_the_first(sharding):
    """A checkpoint has these, and DDP copies them to all replicas as a test begins."""
    module = Featured(nn.BatchNorm2d)
    runner = fit_sharded(module, (1,), strategy={"sharding": sharding})
    runner.test(module, featured.loader(2), verbose=False)
    alone = Featured(nn.BatchNorm2d)
    alone.load_state_dict(full_module_state(module))
    expected = Trainer(devices=1, plugins=LightningEnvironment(), **featured.QUIET)
    expected.test(alone, featured.loader(4), verbose=False)
    assert_same_metrics(runner, expected)


@pytest.mark.spmd(2)
def test_ranks_of_a_domain_share_random_numbers():
    """Whatever the user seeds: dropout of replicated activations must be the same on all."""
    torch.manual_seed(dist.get_rank())
    runner = trainer((2,), max_steps=1)
    module = make("simple_cnn", torch.float32)
    torch.manual_seed(dist.get_rank())
    drawn = []
    module.on_train_start = lambda: drawn.append(torch.rand(3))
    runner.fit(module, loader("simple_cnn", torch.float32, 2, 8))
    everywhere = [torch.empty(3) for _ in range(2)]
    dist.all_gather(everywhere, drawn[0])
    assert torch.equal(*everywhere)


class Returned(LightningModule):
    """Returns its batch, into which a callback writes for the next one."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Conv2d(1, 1, 3, padding=1).double()
        self.same = []

    def test_step(self, batch, batch_idx):
        batch["score"] = self.net(batch["x"])
        return batch

    def on_test_batch_end(self, outputs, batch, *_):
        outputs["label"] = outputs["score"].mean() > 0
        self.same.append(outputs is batch and batch["label"].ndim == 0)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_a_step_returns_its_batch_itself(sharding):
    module = Returned()
    batches = DataLoader([{"x": torch.randn(1, 7, 4).double()} for _ in range(2)], 1)
    trainer((2,), strategy={"sharding": sharding}).test(module, batches, verbose=False)
    assert module.same == [True, True]


class Gathers(Featured):
    """Keeps what it predicts, and gathers it from all replicas at the end."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def predict_step(self, batch, batch_idx):
        self.kept.append(self(batch["x"]))

    def on_predict_epoch_end(self):
        self.found = self.all_gather(torch.cat(self.kept))


def assert_gathers(module, replicas):
    with torch.no_grad():
        expected = module(torch.stack([featured.sample(i)["x"] for i in range(4)]))
    found = lightning_shard.gather(module.found)
    assert found.shape == (replicas, 4 // replicas, *expected.shape[1:])
    by_replica = torch.stack([expected[i::replicas] for i in range(replicas)])
    torch.testing.assert_close(found, by_replica, rtol=1e-10, atol=1e-12)


@pytest.mark.quick_rows("2x2")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(2,), (4,), (2, 2)], ids=["2x2", "1x4", "1x(2x2)"])
def test_split_fields_are_gathered_over_replicas(domain):
    """Each rank gathers its own rows."""
    module, runner = Gathers(), trainer(domain)
    runner.predict(module, featured.loader(1, 4), return_predictions=False)
    assert isinstance(module.found, lightning_shard.DomainTensor)
    assert_gathers(module, runner.strategy.replicas)


@pytest.mark.spmd(1)
def test_fields_in_tiles_are_gathered_over_one_replica():
    module = Gathers()
    strategy, environment = lightning_shard.TiledStrategy(3), LightningEnvironment()
    runner = Trainer(devices=1, strategy=strategy, plugins=environment, **featured.QUIET)
    runner.predict(module, featured.loader(2, 4), return_predictions=False)
    assert_gathers(module, 1)
