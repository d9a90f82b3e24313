"""Checkpoints of other strategies are read, and ours by others' tools."""

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from lightning_shard.checkpoint.state import load_optimizer_state
from tests import pool
from tests.checkpoint.tiny import BATCH, SAMPLES, SaveAt, fit, mean_over_ranks, quiet, sample, tiny
from tests.training import Fields, Losses, shared_path


class Simple(LightningModule):
    """Without complex weights, which FSDP2 alone does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), nn.Conv1d(3, 1, 3, padding=1))
        self.double()

    def training_step(self, batch, batch_idx):
        return (self.network(batch) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sharded(Simple):
    """As ModelParallelStrategy wants it."""

    def configure_model(self):
        for layer in self.network:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def simple(cls: type[Simple] = Simple) -> Simple:
    torch.manual_seed(7)
    return cls()


def lightnings_loader(replicas: int = 1, samples: int = SAMPLES) -> DataLoader:
    """In the order that Lightning gives to several processes, whatever their strategy."""
    data = Fields(sample, samples)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    replica = dist.get_rank() * replicas // ranks if ranks > 1 else 0
    order = DistributedSampler(data, replicas, replica)
    return DataLoader(data, BATCH // replicas, sampler=order)


in_lightnings_order = mock.patch("tests.checkpoint.tiny.loader", lightnings_loader)


@pytest.mark.quick_rows("file")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("directory", [True, False], ids=["directory", "file"])
def test_model_parallel_strategy(directory):
    path, losses = shared_path("some.ckpt"), Losses()
    runner = Trainer(
        accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[losses, SaveAt(path, 6, "epoch")], plugins=TorchElasticEnvironment(),
        strategy=ModelParallelStrategy(2, 1, save_distributed_checkpoint=directory),
    )  # fmt: skip
    with quiet(), in_lightnings_order:
        runner.fit(simple(Sharded), lightnings_loader(2))
        resumed, _, _ = fit((2,), module=simple(), path=path)
    torch.testing.assert_close(mean_over_ranks(resumed), mean_over_ranks(losses.values[6:]))


def continue_in_four(path: str) -> None:
    expected = torch.load(Path(path).with_name("expected.pt"), weights_only=True)
    with in_lightnings_order:
        losses, _, _ = fit((2,), module=simple(), path=Path(path))
    torch.testing.assert_close(mean_over_ranks(losses), expected["losses"], rtol=1e-6, atol=0)
    said = pytest.warns(UserWarning, match="not say in which order the samples were read")
    with said if dist.get_rank() == 0 else nullcontext():
        fit((2,), module=simple(), path=Path(path))


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".ckpt", "-ddp.ckpt"])
def test_lightning_in_the_middle_of_an_epoch(tmp_path, ending):
    """The batches that were read are skipped, though Lightning kept no state of the loader."""
    pool.pool_of(4)  # forked before this process trains
    losses, path = Losses(), tmp_path / f"some{ending}"
    runner = Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[losses, SaveAt(path, 4)],
        plugins=LightningEnvironment(), use_distributed_sampler=False,
    )  # fmt: skip
    with quiet():
        runner.fit(simple(), lightnings_loader())
    torch.save({"losses": torch.tensor(losses.values[4:]).double()}, tmp_path / "expected.pt")
    if "ddp" in ending:  # names as a script of one's own that wraps a module saves them
        saved = torch.load(path, weights_only=True)
        saved["state_dict"] = {f"module.{k}": v for k, v in saved["state_dict"].items()}
        torch.save(saved, path)
    pool.pool_of(4).run(continue_in_four, {"path": str(path)})


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two groups of parameters, in another order than the module's."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    groups = [
        {"params": [*module[1].parameters()], "lr": 0.1},
        {"params": [*module[0].parameters()], "lr": 0.2},
    ]
    optimizer = torch.optim.Adam(groups)
    module(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return module, optimizer


def renamed(state: dict, prefix: str) -> dict:
    groups = [{**g, "params": [prefix + n for n in g["params"]]} for g in state["param_groups"]]
    return {"state": {prefix + n: v for n, v in state["state"].items()}, "param_groups": groups}


@pytest.mark.parametrize("kind", ["names", "flat", "fsdp1", "ddp", "integers"])
def test_states_of_optimizers_by_name(kind):
    module, optimizer = trained()
    expected = optimizer.state_dict()
    state = get_optimizer_state_dict(module, optimizer)
    if kind == "flat":
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state = get_optimizer_state_dict(module, optimizer, options=options)
    elif kind in ("fsdp1", "ddp"):
        state = renamed(state, "module." if kind == "ddp" else "_fsdp_wrapped_module.")
    elif kind == "integers":
        state = expected
    fresh = torch.optim.Adam(
        [{"params": group["params"], "lr": 9.0} for group in optimizer.param_groups]
    )
    load_optimizer_state(fresh, state, module)
    torch.testing.assert_close(fresh.state_dict()["state"], expected["state"])
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]


def test_optimizers_of_other_parameters():
    module, optimizer = trained()
    state = get_optimizer_state_dict(module, optimizer)
    del state["state"]["0.weight"]
    state["param_groups"][1]["params"].remove("0.weight")
    with pytest.raises(ValueError, match=r"of other parameters .* differ in 0\.weight"):
        load_optimizer_state(optimizer, state, module)
    fewer = torch.optim.Adam([module[0].weight])
    with pytest.raises(ValueError, match="has 4 parameters in 2 groups, this one 1 in 1"):
        load_optimizer_state(fewer, optimizer.state_dict(), module)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_lightning_reads_our_directories():
    """What `fabric consolidate` calls; the layout is that of ModelParallelStrategy."""
    path = shared_path("some.ckpt")
    _, state, _ = fit((2,), SaveAt(path, 12), module=tiny(), checkpoint_format="sharded")
    if dist.get_rank() == 0:
        read = _load_distributed_checkpoint(path)
        for name, value in state.items():
            assert torch.equal(read["state_dict"][name], value), name
        assert read["optimizer_0"]["state"]["first.weight"]["exp_avg"].shape == (5, 1, 3)
        assert read["global_step"] == 12
