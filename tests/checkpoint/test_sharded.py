"""Sharded directories: each rank writes its part; they are whole or not there."""

import json
import os
import pickle
import re
import shutil
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.tensor import DTensor

from lightning_shard import HybridShardStrategy, load_weights
from lightning_shard.checkpoint import directory as sharded_directory
from lightning_shard.checkpoint.dcp_reader import read_dcp
from lightning_shard.data import atomic
from lightning_shard.trainer import checkpoint_io
from tests.checkpoint.tiny import SaveAt, fit, names, run_with, tiny
from tests.training import shared_path

SLOW = pytest.mark.slow
DIRECTORY = {"checkpoint_format": "sharded"}
LATER = {"checkpoint_format": "async"}


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


class CountedWriter(sharded_directory.Writer):
    """Counts the numbers that a rank writes."""

    written = 0

    def write_data(self, plan, planner):
        for item in plan.items:
            if item.tensor_data is not None:
                CountedWriter.written += item.tensor_data.chunk.sizes.numel()
        return super().write_data(plan, planner)


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_each_rank_writes_only_its_part():
    path = shared_path("some.ckpt")
    original, sharded_directory.Writer = sharded_directory.Writer, CountedWriter
    try:
        wide = tiny(width=64)
        _, state, module = fit((2,), SaveAt(path, 4), module=wide, sharding="full", **DIRECTORY)
    finally:
        sharded_directory.Writer = original
    shards = [p.to_local() for p in module.parameters() if isinstance(p, DTensor)]
    whole = [value for name, value in state.items() if "running" in name or "scale" in name]
    own = 3 * sum(map(torch.numel, shards)) + 3 * sum(map(torch.numel, whole))  # AdamW: two moments
    assert 0 < CountedWriter.written < own + len(state)


@pytest.mark.slow
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
    rank = dist.get_rank()  # in a thread beside a step it would be that among data replicas

    class Failing(sharded_directory.Writer):
        def write_data(self, plan, planner):
            calls[0] += 1
            if where == "shards" and calls[0] > 1 and rank == 1:
                raise OSError(28, "No space left on device")
            return super().write_data(plan, planner)

    def save(rest, *args, original=torch.save, **kwargs):
        if where == "end" and calls[0] > 1 and isinstance(rest, dict) and "loops" in rest:
            raise OSError(28, "No space left on device")
        return original(rest, *args, **kwargs)

    original, sharded_directory.Writer = sharded_directory.Writer, Failing
    original_save, torch.save = torch.save, save
    try:
        with pytest.raises(Exception, match="No space left on device"):
            fit((2,), SaveAt(path, 2), SaveAt(path, 4), **options)
    finally:
        sharded_directory.Writer, torch.save = original, original_save
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


@pytest.mark.slow
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


class OldPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class Attribute:
    def __init__(self, owner, name):
        self.reduced = getattr, (owner, name)

    def __reduce__(self):
        return self.reduced


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_of_old_pythons_are_read(tmp_path):
    saved = {"weight": torch.arange(6.0).reshape(2, 3)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    with (tmp_path / ".metadata").open("wb") as file:
        OldPickler(file).dump(metadata)
    read = read_dcp(tmp_path)["weight"]
    torch.testing.assert_close(read.read((slice(0, 2), slice(0, 3))), saved["weight"])


@pytest.mark.parametrize(
    "attribute", [Attribute(Metadata, "__init__"), Attribute(_MEM_FORMAT_ENCODING, "__new__")]
)
def test_metadata_take_nothing_but_members_by_name(attribute, tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(attribute))
    with pytest.raises(ValueError, match=r"__ is not part of a checkpoint's metadata"):
        read_dcp(tmp_path)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_formats_replace_each_other():
    path = shared_path("some.ckpt")
    for options in (DIRECTORY, {}, DIRECTORY):
        fit((2,), SaveAt(path, 4), max_epochs=1, **options)
        dist.barrier()
        assert path.is_dir() == bool(options)
        assert names(path.parent) == {"some.ckpt"}


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_large_states_are_sharded_by_default():
    limit = checkpoint_io.SHARDED_ABOVE_BYTES
    assert limit == 16 * 2**30
    small, large = shared_path("small.ckpt"), shared_path("large.ckpt")
    fit((2,), SaveAt(small, 2), max_epochs=1)
    checkpoint_io.SHARDED_ABOVE_BYTES = 500
    try:
        fit((2,), SaveAt(large, 2), max_epochs=1)
    finally:
        checkpoint_io.SHARDED_ABOVE_BYTES = limit
    assert (small.is_file(), large.is_dir()) == (True, True)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_weights_of_a_directory():
    path, module = shared_path("some.ckpt"), tiny(seed=1)
    _, state, _ = fit((2,), SaveAt(path, 12), **DIRECTORY)
    load_weights(module, path)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in state.items())


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"'sharded' or 'async'; got 'many'"):
        HybridShardStrategy(checkpoint_format="many")
