"""What a strategy writes and reads."""

import random
from collections import UserDict, deque
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard import DomainTensor, init_mesh, parallelize
from lightning_shard.checkpoint.directory import read_directory
from lightning_shard.checkpoint.foreign import OWN
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.data.tree import leaves_of
from lightning_shard.trainer.checkpoint_io import CheckpointFiles, complete_io
from lightning_shard.trainer.interrupted_save import InterruptedSave
from lightning_shard.trainer.saving import Saver
from tests import training
from tests.checkpoint.test_resume_inside_epoch import shared_path
from tests.trainer.featured import Featured, fit_alone, fit_sharded, loader, sample

CPU = torch.device("cpu")


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def trained(seed, steps=2):
    """A sharded network and its optimizer, after some steps."""
    module = network(seed)
    mesh = init_mesh({"data": -1, "domain": 1}, "cpu")
    parallelize(module, mesh)
    optimizer = torch.optim.Adam(module.parameters())
    for step in range(steps):
        torch.manual_seed(step)
        module(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer, mesh


def write(saver, path, module, optimizer, mesh):
    io = complete_io(None)
    state = {
        "epoch": 3,
        "global_step": 7,
        "state_dict": saver.gather_module(module),
        "optimizer_states": [saver.gather_optimizer(optimizer, module)],
    }
    checkpoint = saver.mark(state, mesh, CPU)
    saver.write(checkpoint, path, io, module=module, optimizers=[optimizer])
    return io


@pytest.mark.quick_rows("single")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("file_format", ["single", "sharded", "async"])
def test_what_is_written_is_read(file_format):
    saver = Saver(file_format)
    path = shared_path("saving") / "some.ckpt"
    module, optimizer, mesh = trained(seed=1)
    wanted = full_module_state(module)
    io = write(saver, path, module, optimizer, mesh)
    saver.finish()
    assert path.is_dir() == (file_format != "single")
    other, other_optimizer, _ = trained(seed=2)
    found = saver.read(path, io, other)
    assert (found["epoch"], found["global_step"]) == (3, 7)
    assert found[OWN]["mesh"] == {"data": 2, "domain": 1}
    saver.load_module(other, found, CPU, strict=True)
    saver.load_optimizers([other_optimizer], found, other)
    for name, value in full_module_state(other).items():
        assert torch.equal(value, wanted[name]), name
    for mine, its in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert isinstance(mine["exp_avg"], DTensor)
        assert torch.equal(mine["exp_avg"].to_local(), its["exp_avg"].to_local())
    saver.remove(path, io)
    dist.barrier()
    assert not path.exists()


@pytest.mark.spmd(2)
def test_buffers_are_those_of_the_first_rank():
    module, _, _ = trained(seed=1)
    norm = module[1]
    norm.running_mean.fill_(dist.get_rank() + 1.0)
    state = Saver().gather_module(module)
    assert state["1.running_mean"].tolist() == [1.0] * 5
    assert norm.running_mean.tolist() == [1.0] * 5


@pytest.mark.spmd(2)
def test_each_rank_goes_on_with_its_random_numbers():
    saver, path = Saver("single"), shared_path("saving") / "some.ckpt"
    module, optimizer, mesh = trained(seed=1)
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    io = write(saver, path, module, optimizer, mesh)
    wanted = torch.rand(3), random.random()
    saver.read(path, io, module)
    saver.continue_random_numbers(mesh, CPU)
    assert torch.equal(torch.rand(3), wanted[0])
    assert random.random() == wanted[1]


@pytest.mark.spmd(2)
def test_a_directory_needs_a_mounted_file_system():
    saver = Saver("sharded")
    module, optimizer, mesh = trained(seed=1)
    with pytest.raises(ValueError, match="needs a directory on a mounted file system"):
        write(saver, "memory://some.ckpt", module, optimizer, mesh)


@pytest.mark.spmd(2)
def test_another_number_of_optimizers_is_refused():
    module, optimizer, _ = trained(seed=1)
    with pytest.raises(ValueError, match=r"holds 0 optimizers.* returned 1\."):
        Saver().load_optimizers([optimizer], {"optimizer_states": []}, module)


def test_formats_that_there_are_not():
    with pytest.raises(ValueError, match="'sharded' or 'async'; got 'zip'"):
        Saver("zip")  # pyright: ignore


def test_files_of_this_package_where_lightning_has_none():
    assert type(complete_io(None)) is CheckpointFiles
    own = TorchCheckpointIO()
    assert complete_io(own) is own
    wrapped = complete_io(AsyncCheckpointIO())
    assert type(wrapped.checkpoint_io) is CheckpointFiles
    wrapped.teardown()


class Remembers(Featured):
    """Keeps the samples that it saw last, as an imputer keeps the mask of missing values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(4, 1, 9, 7, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        self.last = batch["x"]
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_buffers_that_became_fields(kind):
    """They are saved whole, and read by one process and on another mesh, also where they split."""
    path, strategy = shared_path("fields.ckpt"), {"checkpoint_format": kind}
    module, alone = Remembers(), Remembers()
    fit_alone(alone, limit_val_batches=0)
    runner = fit_sharded(module, (2,), strategy=strategy, limit_val_batches=0)
    assert isinstance(module.last, DomainTensor)
    runner.save_checkpoint(path)
    if kind == "single":
        state = torch.load(path, weights_only=True)["state_dict"]
        Remembers().load_state_dict(state)
        assert torch.equal(state["last"], alone.last)
    for domain, again in (((2,), module), ((2,), Remembers()), ((1,), Remembers())):
        runner = training.trainer(domain, strategy=strategy)
        runner.validate(again, loader(2), ckpt_path=path, verbose=False)
        assert torch.equal(full_module_state(again)["last"], alone.last)


class Twice(nn.Module, Callback):
    """A part under two names, a complex parameter, a buffer and a hook of the user's."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1)).double()
        self.second = self.first
        self.phase = nn.Parameter(torch.tensor([[1.0 + 2.0j], [0.5j]], dtype=torch.complex128))
        self.kept = [self.phase]
        self.register_forward_hook(halve)

    def forward(self, x):
        return self.second(self.first(x)).relu() * self.phase.abs().sum()


def halve(module, args, output):
    return output / 2


class Holding(Featured):
    """As of many programs, whose networks are arguments: they are in the checkpoint twice."""

    def __init__(self, part, watch):
        super().__init__()
        self.save_hyperparameters()
        self.part = part

    def configure_callbacks(self):
        return [self.part, self.hparams.watch]

    def forward(self, x):
        return super().forward(x) + self.part(x)


@pytest.mark.spmd(2)
def test_modules_among_hyperparameters_where_parameters_are_whole():
    """They are saved as those of one process: in their classes, with their weights."""
    path, module = shared_path("holding.ckpt"), Holding(Twice(), Callback())
    runner = fit_sharded(module, (2,), strategy={"sharding": "none"}, limit_val_batches=0)
    runner.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["hyper_parameters"]
    part = saved["part"]
    assert type(part) is Twice
    assert part.second is part.first
    assert part.kept[0] is part.phase
    assert [*part._forward_hooks.values()] == [halve]
    x = sample(0)["x"][None]
    assert torch.equal(part.eval()(x), module.part.eval()(x))


@pytest.mark.quick_rows("single")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_sharded_modules_among_hyperparameters_are_left_out(kind):
    path, module = shared_path("holding.ckpt"), Holding(Twice(), Callback())
    strategy = {"checkpoint_format": kind, "sharding": "full"}
    runner = fit_sharded(module, (2,), strategy=strategy, limit_val_batches=0)
    words = r"part among the hyperparameters .* load_from_checkpoint\(path, part=\.\.\.\)"
    with pytest.warns(UserWarning, match=words) if dist.get_rank() == 0 else nullcontext():
        runner.save_checkpoint(path)
    saved = torch.load(path, weights_only=False) if path.is_file() else read_directory(path, False)
    assert [*saved["hyper_parameters"]] == ["watch"]
    if kind == "single":
        again = Holding.load_from_checkpoint(path, part=Twice(), weights_only=False)
        state = full_module_state(module)
        assert all(torch.equal(state[n], value) for n, value in again.state_dict().items())
    module.on_save_checkpoint = lambda checkpoint: checkpoint.update(ema=module.part)
    with pytest.raises(TypeError, match=r"cannot hold the module Twice.*put its state_dict\(\)"):
        runner.save_checkpoint(path)


class Averages(NamedTuple):
    decay: float
    weights: list[torch.Tensor]


@dataclass
class Record:
    weight: torch.Tensor


@pytest.mark.quick_rows("sharded")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_shards_in_any_container_are_saved_whole(kind):
    path, module = shared_path("containers.ckpt"), Featured()
    strategy = {"checkpoint_format": kind, "sharding": "full"}
    runner = fit_sharded(module, (2,), strategy=strategy, limit_val_batches=0)
    wanted = full_module_state(module)["network.0.weight"]
    shard = module.network[0].weight
    mine = {
        "named": Averages(0.9, [shard]), "deque": deque([shard]), "record": Record(shard),
        "user": UserDict(a=shard), "dict": {"a": (shard,)},
    }  # fmt: skip
    module.on_save_checkpoint = lambda checkpoint: checkpoint.update(mine=mine)
    runner.save_checkpoint(path)
    saved = torch.load(path, weights_only=False) if path.is_file() else read_directory(path, False)
    for name, value in saved["mine"].items():
        (weight,) = [x for x in leaves_of(value) if isinstance(x, torch.Tensor)]
        assert type(weight) is torch.Tensor, name
        assert weight.equal(wanted), name
    mine["optimizer"] = runner.optimizers[0]
    said = r"cannot hold an object with sharded .* an optimizer: put its state_dict\(\) into it"
    with pytest.raises((TypeError, RuntimeError), match=said):
        runner.save_checkpoint(path)
    mine["optimizer"] = runner.optimizers[0].state_dict()
    runner.save_checkpoint(path)


def test_what_is_removed_is_not_named_as_the_last_checkpoint(tmp_path, capsys):
    """A search of the learning rate saves a checkpoint, reads it and removes it."""
    kept = tmp_path / "kept.ckpt"
    kept.touch()
    saver = Saver("single", timeout_s=1)
    lost = SimpleNamespace(is_disconnected=lambda: True)
    runner = SimpleNamespace(checkpoint_callbacks=[ModelCheckpoint()], ckpt_path=str(kept))
    runner.global_rank = 0
    for saver.last_written, said in ((tmp_path / "search.ckpt", kept), (kept, kept)):
        runner.checkpoint_callbacks[0].save_on_exception = True
        InterruptedSave(lost, saver).on_exception(runner, None, RuntimeError())
        assert capsys.readouterr().err.endswith(f"the last whole one is {said}\n")
    kept.unlink()
    runner.checkpoint_callbacks[0].save_on_exception = True
    InterruptedSave(lost, saver).on_exception(runner, None, RuntimeError())
    assert capsys.readouterr().err.endswith("there is none from before\n")
