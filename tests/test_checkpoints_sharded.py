"""Sharded directories: each rank writes its part; they are whole or not there."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric

from lightning_shard import (
    HybridShardStrategy,
    atomic,
    checkpoint_strategy,
    load_weights,
    sharded_directory,
)
from lightning_shard.checkpoint import full
from lightning_shard.dcp_files import read_dcp
from tests.tiny import SaveAt, fit, tiny
from tests.training import shared_path

SLOW = pytest.mark.slow
DIRECTORY = {"checkpoint_format": "sharded"}
LATER = {"checkpoint_format": "sharded", "async_checkpoint": True}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.spmd(4)
def test_what_is_in_it():
    path = shared_path("some.ckpt")
    _, state, module = fit((2,), SaveAt(path, 12), **DIRECTORY)
    assert names(path.parent) == {"some.ckpt"}
    files = {f"__{rank}_0.distcp" for rank in range(4)}
    assert names(path) == {"manifest.json", "meta.pt", ".metadata", *files}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["mesh"] == {"data": 2, "domain": 2}
    assert (manifest["world_size"], manifest["epoch"], manifest["global_step"]) == (4, 1, 12)
    assert set(manifest["versions"]) == {"torch", "lightning", "lightning_shard"}
    assert manifest["hyper_parameters"]["width"] == 5
    assert set(manifest["files"]) == names(path) - {"manifest.json"}
    stored = read_dcp(path)
    assert stored["state_dict"].keys() == state.keys()
    for name, value in stored["state_dict"].items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value.whole(), state[name]), name
    assert set(stored["optimizer_0"]["state"]) == {name for name, _ in module.named_parameters()}


class CountedWriter(FileSystemWriter):
    """Counts the numbers that a rank writes."""

    written = 0

    def write_data(self, plan, planner):
        for item in plan.items:
            if item.tensor_data is not None:
                CountedWriter.written += item.tensor_data.chunk.sizes.numel()
        return super().write_data(plan, planner)


@pytest.mark.spmd(4)
def test_each_rank_writes_only_its_part():
    path = shared_path("some.ckpt")
    original, sharded_directory.FileSystemWriter = sharded_directory.FileSystemWriter, CountedWriter
    try:
        _, state, module = fit((2,), SaveAt(path, 4), module=tiny(width=64), **DIRECTORY)
    finally:
        sharded_directory.FileSystemWriter = original
    shards = [p.to_local() for p in module.parameters() if isinstance(p, DTensor)]
    whole = [value for name, value in state.items() if "running" in name or "scale" in name]
    own = 3 * sum(map(torch.numel, shards)) + 3 * sum(map(torch.numel, whole))  # AdamW: two moments
    assert 0 < CountedWriter.written < own + len(state)


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("options", "where"),
    [
        (DIRECTORY, "shards"),
        pytest.param(DIRECTORY, "end", marks=SLOW),
        pytest.param(LATER, "shards", marks=SLOW),
        (LATER, "end"),
    ],
    ids=["now-shards", "now-end", "later-shards", "later-end"],
)
def test_a_rank_fails(options, where):
    """The old directory stays, nothing else is left, and all ranks raise."""
    path = shared_path("some.ckpt")
    calls = [0]

    class Failing(FileSystemWriter):
        def write_data(self, plan, planner):
            calls[0] += 1
            if where == "shards" and calls[0] > 1 and dist.get_rank() == 1:
                raise OSError(28, "No space left on device")
            return super().write_data(plan, planner)

    def save(rest, *args, original=torch.save, **kwargs):
        if where == "end" and calls[0] > 1 and isinstance(rest, dict) and "loops" in rest:
            raise OSError(28, "No space left on device")
        return original(rest, *args, **kwargs)

    original, sharded_directory.FileSystemWriter = sharded_directory.FileSystemWriter, Failing
    original_save, torch.save = torch.save, save
    try:
        with pytest.raises(Exception, match="No space left on device"):
            fit((2,), SaveAt(path, 2), SaveAt(path, 4), **options)
    finally:
        sharded_directory.FileSystemWriter, torch.save = original, original_save
    dist.barrier()
    assert names(path.parent) == {"some.ckpt"}
    assert json.loads((path / "manifest.json").read_text())["global_step"] == 2
    fit((2,), path=path, **options)


def break_and_load(path, change, text):
    broken = path.with_name("broken.ckpt")
    if dist.get_rank() == 0:
        shutil.copytree(path, broken)
        change(broken)
    dist.barrier()
    with pytest.raises((ValueError, RuntimeError), match=text) as caught:
        fit((2,), path=broken)
    assert "\n" not in str(caught.value)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(broken)
    dist.barrier()


def flip_a_byte(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def without_hash(folder: Path) -> None:
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["files"]["meta.pt"]["sha256"]
    file.write_text(json.dumps(manifest))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/nowhere/evil",)


@pytest.mark.spmd(2)
def test_incomplete_directories_are_refused():
    path = shared_path("some.ckpt")
    fit((2,), SaveAt(path, 4), **DIRECTORY)
    cases = {
        "'__1_0.distcp' is missing": lambda folder: (folder / "__1_0.distcp").unlink(),
        "'__1_0.distcp' is not what was written": flip_a_byte,
        "'meta.pt' has 5 bytes instead of": lambda f: (f / "meta.pt").write_bytes(b"hello"),
        "no manifest of lightning_shard 1": lambda f: (f / "manifest.json").write_text("{"),
        "'manifest.json' is missing": lambda f: (f / "manifest.json").unlink(),
        "manifest has no hash of 'meta.pt'": without_hash,
    }
    for text, change in cases.items():
        break_and_load(path, change, re.escape(text))


def test_metadata_run_no_code(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"mkdir is not part of a checkpoint's metadata"):
        read_dcp(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match="is not whole"):
        read_dcp(tmp_path)


def run_with(callback, path=None, **options):
    return fit((2,), callback, path=path, enable_checkpointing=True, **options)


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "options", [pytest.param(DIRECTORY, marks=SLOW), LATER], ids=["now", "later"]
)
def test_model_checkpoint(options):
    """Top-k, last, versions, removal; `last` and `best` are found."""
    folder = shared_path("here")
    best = ModelCheckpoint(
        folder, monitor="val_loss", mode="max", save_top_k=2, save_last=True, filename="{step}"
    )
    losses, _, _ = run_with(best, max_epochs=4, **options)
    assert len(best.best_k_models) == 2
    assert names(folder) == {Path(p).name for p in best.best_k_models} | {"last.ckpt"}
    assert len(losses) == 24
    dist.barrier()
    # what a run that was killed while saving leaves is not taken for a checkpoint
    if dist.get_rank() == 0:
        shutil.copytree(folder / "last.ckpt", folder / "last.ckpt.partial")
        (folder / "last.ckpt.partial" / "manifest.json").unlink()
    dist.barrier()
    saved_in = json.loads((folder / "last.ckpt" / "manifest.json").read_text())["epoch"]
    resumed, _, _ = run_with(ModelCheckpoint(folder, save_last=True), path="last", max_epochs=5)
    assert len(resumed) == 6 * (4 - saved_in)


@pytest.mark.spmd(2)
def test_last_as_a_link():
    folder = shared_path("here")
    run_with(ModelCheckpoint(folder, save_last="link", every_n_epochs=1), **DIRECTORY)
    assert (folder / "last.ckpt").is_symlink()
    resumed, _, _ = run_with(ModelCheckpoint(folder), path="last", max_epochs=3)
    assert len(resumed) == 6


@pytest.mark.spmd(2)
def test_an_interrupted_replacement_leaves_a_whole_one():
    """Between the two renames the old one has a name that `last` finds."""
    folder = shared_path("here")
    run_with(ModelCheckpoint(folder, save_last=True), **DIRECTORY)
    last = folder / "last.ckpt"
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            if path != last:
                atomic.remove(path)
        last.rename(atomic.replaced_name(last))
    dist.barrier()
    resumed, _, _ = run_with(ModelCheckpoint(folder), path="last", max_epochs=3)
    assert len(resumed) == 6


@pytest.mark.spmd(2)
def test_formats_replace_each_other():
    path = shared_path("some.ckpt")
    for options in (DIRECTORY, {}, DIRECTORY):
        fit((2,), SaveAt(path, 4), max_epochs=1, **options)
        dist.barrier()
        assert path.is_dir() == bool(options)
        assert names(path.parent) == {"some.ckpt"}


class Copy(Callback):
    """Keeps sharded tensors in its state."""

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 3:
            self.kept = [p.detach().clone() for p in module.parameters()]

    def state_dict(self):
        return {"kept": self.kept} if hasattr(self, "kept") else {}

    def load_state_dict(self, state):
        self.loaded = state["kept"]


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=SLOW), DIRECTORY, pytest.param(LATER, marks=SLOW)],
    ids=["file", "now", "later"],
)
def test_sharded_tensors_of_callbacks(options):
    path, saving, loading = shared_path("some.ckpt"), Copy(), Copy()
    fit((2,), saving, SaveAt(path, 4), **options)
    assert any(isinstance(value, DTensor) for value in saving.kept)
    fit((2,), loading, path=path)
    for loaded, kept in zip(loading.loaded, full(saving.kept), strict=True):
        assert torch.equal(loaded, kept)


@pytest.mark.spmd(4)
@pytest.mark.parametrize("options", [pytest.param({}, marks=SLOW), DIRECTORY], ids=["file", "dir"])
def test_averaged_weights(options):
    path = shared_path("some.ckpt")
    losses, state, _ = fit((2,), WeightAveraging(), SaveAt(path, 4), **options)
    resumed, resumed_state, _ = fit((2,), WeightAveraging(), path=path)
    assert resumed == losses[4:]
    assert not [n for n, value in state.items() if not torch.equal(resumed_state[n], value)]


class Deferred(LightningModule):
    """On the meta device until it is sharded, with a metric that checkpoints keep."""

    def __init__(self):
        super().__init__()
        self.seen = MeanMetric()
        self.seen.persistent(True)

    def configure_model(self):
        if not hasattr(self, "network"):
            with torch.device("meta"):
                self.network = nn.Conv1d(1, 1, 3, padding=1, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        loss = (self.network(batch) - batch).square().mean()
        self.seen.update(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class WithObject(Deferred):
    """Puts into the checkpoint what only weights_only=False reads."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["more"] = Path("a")


@pytest.mark.spmd(2)
def test_weights_only_of_a_directory():
    path = shared_path("some.ckpt")
    fit((2,), SaveAt(path, 4), WithPath(), **DIRECTORY)
    with pytest.raises(ValueError, match="besides tensors and plain values"):
        fit((2,), path=path)
    fit((2,), path=path, weights_only=False)


class WithPath(Callback):
    def state_dict(self):
        return {"where": Path("a")}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("options", [{}, DIRECTORY], ids=["file", "directory"])
def test_modules_of_the_meta_device(options):
    """They are loaded when they have memory; Lightning then forgets weights_only=False."""
    path, modules = shared_path("some.ckpt"), [Deferred(), Deferred()]
    losses, state, _ = fit((2,), SaveAt(path, 4), module=modules[0], **options)
    resumed, resumed_state, _ = fit((2,), module=modules[1], path=path)
    assert resumed == losses[4:]
    assert state.keys() > {"network.weight", "seen.mean_value"}
    assert all(torch.equal(resumed_state[name], value) for name, value in state.items())
    odd = SaveAt(path.with_name("odd.ckpt"), 4)
    fit((2,), odd, module=WithObject(), **options)
    with pytest.raises(ValueError, match=r"Lightning 2\.6 forgets weights_only=False"):
        fit((2,), module=Deferred(), path=odd.path, weights_only=False)


@pytest.mark.spmd(2)
def test_large_states_are_sharded_by_default():
    limit = checkpoint_strategy.SHARDED_ABOVE_BYTES
    assert limit == 16 * 2**30
    small, large = shared_path("small.ckpt"), shared_path("large.ckpt")
    fit((2,), SaveAt(small, 2), max_epochs=1)
    checkpoint_strategy.SHARDED_ABOVE_BYTES = 500
    try:
        fit((2,), SaveAt(large, 2), max_epochs=1)
    finally:
        checkpoint_strategy.SHARDED_ABOVE_BYTES = limit
    assert (small.is_file(), large.is_dir()) == (True, True)


@pytest.mark.spmd(2)
def test_weights_of_a_directory():
    path, module = shared_path("some.ckpt"), tiny(seed=1)
    _, state, _ = fit((2,), SaveAt(path, 12), **DIRECTORY)
    load_weights(module, path)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in state.items())


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"must be 'auto', 'single' or 'sharded'; got 'many'"):
        HybridShardStrategy(checkpoint_format="many")
    with pytest.raises(ValueError, match="async_checkpoint writes sharded directories"):
        HybridShardStrategy(checkpoint_format="single", async_checkpoint=True)
