"""A flipped bit anywhere in a checkpoint: the same content, or one sentence that names the file."""

import json
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_shard import FieldFile, load_weights
from lightning_shard.checkpoint import directory as sharded_directory
from lightning_shard.checkpoint.manifest import FORMAT, problem_of
from lightning_shard.checkpoint.safetensors_file import compare_all, read_safetensors
from lightning_shard.checkpoint.stored import StoredState, StoredTensor
from lightning_shard.checkpoint.torch_file import read_torch_file
from lightning_shard.cli.main import main
from lightning_shard.trainer.checkpoint_io import CheckpointFiles
from tests import pool
from tests.checkpoint.tiny import SaveAt, Tiny, fit, tiny
from tests.training import shared_path

FORMATS = ("file.ckpt", "weights.pt", "weights.safetensors", "several", "directory.ckpt")


def save(path: str, **options: Any) -> None:
    fit((2,), SaveAt(Path(path), 2), max_steps=2, max_epochs=-1, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same weights in each format."""
    folder = tmp_path_factory.mktemp("damaged")
    pool.pool_of(2).run(save, {"path": str(folder / "file.ckpt")})
    options = {"path": str(folder / "directory.ckpt"), "checkpoint_format": "sharded"}
    pool.pool_of(2).run(save, options)
    for name in ("weights.pt", "weights.safetensors"):
        main(["export", str(folder / "file.ckpt"), str(folder / name)])
    (folder / "several").mkdir()
    shutil.copy(folder / "weights.safetensors", folder / "several/a.safetensors")
    where = dict.fromkeys(read_safetensors(folder / "weights.safetensors"), "a.safetensors")
    index = folder / "several/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    return folder


def opened_path(path: Path) -> Path:
    return path / "model.safetensors.index.json" if path.name == "several" else path


def whole(value: Any) -> Any:
    """With everything in it read."""
    if isinstance(value, StoredTensor):
        return value.whole()
    if isinstance(value, StoredState | dict):
        return {key: whole(v) for key, v in value.items()}
    return type(value)(map(whole, value)) if type(value) in (list, tuple) else value


def by_ckpt_path(path: Path) -> Any:
    """As the strategy reads it, whose ranks share the files of a directory among them."""
    path = opened_path(path)
    if not path.is_dir():
        return whole(CheckpointFiles().load_checkpoint(path))
    if problem := problem_of(path):
        raise ValueError(f"'{path}' is incomplete: {problem}")
    return whole(sharded_directory.read_directory(path, checked=True))


def by_load_weights(path: Path) -> Any:
    module = tiny(seed=1)
    load_weights(module, opened_path(path))
    return dict(module.state_dict())


def by_inspect(path: Path) -> Any:
    """What is said to be whole is read without any check of ours."""
    main(["inspect", str(opened_path(path))])
    unchecked = Tiny()
    source = opened_path(path)
    if path.name in ("file.ckpt", "weights.pt"):
        return read_torch_file(path, checked=True)
    if path.name == "directory.ckpt":
        return whole(sharded_directory.read_directory(path, checked=True))
    load_weights(unchecked, source)
    return dict(unchecked.state_dict())


def by_export(path: Path) -> Any:
    out = path.parent / "exported.pt"
    main(["export", str(opened_path(path)), str(out)])
    return torch.load(out, weights_only=True)


ENTRIES: dict[str, Callable[[Path], Any]] = {
    "ckpt_path": by_ckpt_path,
    "load_weights": by_load_weights,
    "inspect": by_inspect,
    "export": by_export,
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def flip(path: Path, draw: random.Random) -> tuple[Path, int, int]:
    """Change one bit of one file."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    file = draw.choice(files)
    data = bytearray(file.read_bytes())
    place, bit = draw.randrange(len(data)), draw.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return file, place, bit


def outcome(read: Callable[[Path], Any], path: Path, file: Path, expected: Any, capsys: Any) -> str:
    """ "refused", "unharmed", or what is wrong with how the damage was met."""
    try:
        found = read(path)
    except (ValueError, RuntimeError, FileNotFoundError, SystemExit) as err:
        written = capsys.readouterr()
        text = str(err) + written.err + written.out
        names = RuntimeError if read is by_load_weights else ()  # of a name that was changed
        if isinstance(err, RuntimeError) and not isinstance(err, names):
            return f"a {type(err).__name__}: {text}"
        if isinstance(err, SystemExit) and err.code not in ((1,) if read is by_inspect else (1, 2)):
            return f"exit code {err.code}: {text}"
        own = [p.name for p in file.parent.iterdir()] if path.is_dir() else []
        named = any(name in text for name in (path.name, *own))
        return "refused" if named and "Traceback" not in text else f"no name in {text}"
    except Exception as err:
        return f"a {type(err).__name__}: {err}"
    capsys.readouterr()
    return "unharmed" if same(found, expected) else "other numbers"


@pytest.mark.slow
@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__1_0.distcp"])
def test_a_manifest_that_leaves_out_a_file(name, saved, tmp_path, capsys):
    """Nothing would be compared with what was written."""
    path = tmp_path / "directory.ckpt"
    shutil.copytree(saved / path.name, path)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"][name]
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "notes.txt").write_text("which nobody reads")
    for entry in ("ckpt_path", "inspect", "export"):
        found = outcome(ENTRIES[entry], path, path / "manifest.json", None, capsys)
        assert found == "refused", entry
    if name != "meta.pt":  # which has no weights in it
        assert outcome(by_load_weights, path, path / name, None, capsys) == "refused"


@pytest.mark.slow_rows("directory.ckpt-inspect-3")
@pytest.mark.parametrize("flips", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", FORMATS)
def test_flipped_bits(kind, entry, flips, saved, tmp_path, capsys):
    read = ENTRIES[entry]
    expected = read(saved / kind)
    capsys.readouterr()
    draw = random.Random(f"{kind} {entry} {flips}")
    wrong, met = [], Counter[str]()
    for number in range(flips):
        path = tmp_path / str(number) / kind
        path.parent.mkdir()
        copy = shutil.copytree if (saved / kind).is_dir() else shutil.copy
        copy(saved / kind, path)
        where = flip(path, draw)
        found = outcome(read, path, where[0], expected, capsys)
        if found in ("refused", "unharmed"):
            met[found] += 1
        else:
            wrong.append((*where, found))
        shutil.rmtree(path.parent)
    print(f"{kind}, {entry}: of {flips} flipped bits {dict(met)}")
    assert not wrong


@pytest.mark.spmd(2)
def test_all_ranks_refuse_a_changed_file():
    """Each rank compares its share of the records, and all hear of the one that differs."""
    path = shared_path("some.ckpt")
    fit((2,), SaveAt(path, 2), max_steps=2, max_epochs=-1)
    if dist.get_rank() == 0:
        data = bytearray(path.read_bytes())
        weight = torch.load(path, weights_only=True)["state_dict"]["first.weight"]
        data[data.index(weight.numpy().tobytes()) + 5] ^= 4
        path.write_bytes(data)
    dist.barrier()
    with pytest.raises((ValueError, RuntimeError), match=r"some\.ckpt.*its checksum differs"):
        fit((2,), path=path)


@pytest.mark.quick_rows("export")
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_shard_of_another_step(entry, saved, tmp_path, capsys):
    path = tmp_path / "directory.ckpt"
    shutil.copytree(saved / "directory.ckpt", path)
    shard = path / "__1_0.distcp"
    other = tmp_path / "other.ckpt"
    pool.pool_of(2).run(save, {"path": str(other), "checkpoint_format": "sharded",
                               "module": tiny(seed=3)})  # fmt: skip
    shutil.copy(other / "__1_0.distcp", shard)
    with pytest.raises((ValueError, SystemExit)) as caught:
        ENTRIES[entry](path)
    written = capsys.readouterr()
    assert "'__1_0.distcp'" in str(caught.value) + written.err + written.out


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp", "meta.pt"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_file_is_missing(entry, name, saved, tmp_path, capsys):
    path = tmp_path / "directory.ckpt"
    shutil.copytree(saved / "directory.ckpt", path)
    (path / name).unlink()
    if (entry, name) == ("load_weights", "meta.pt"):  # which it does not need
        assert same(by_load_weights(path), by_load_weights(saved / "directory.ckpt"))
        return
    with pytest.raises((ValueError, SystemExit)) as caught:
        ENTRIES[entry](path)
    written = capsys.readouterr()
    assert f"'{name}'" in str(caught.value) + written.err + written.out


METADATA = {
    "a frame of 2**60 bytes": b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b".",
    "text of other bytes": b"\x80\x04\x8c\x02\xff\xfe.",
    "called with other arguments": b"ctorch.distributed.checkpoint.metadata\nMetadata\n(I1\nI2\n"
    b"I3\nI4\nI5\nI6\nI7\ntR.",
    "a set of lists": b"cbuiltins\nset\n((lltR.",
    "nothing": b"",
    "a number": b"\x80\x04K\x01.",
    "an index": b"\x80\x04h\x05.",
    "deep": b"\x80\x04" + b"(" * 10**5 + b"." ,
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_broken_metadata_are_one_sentence(name, tmp_path):
    folder = tmp_path / "a.ckpt"
    dcp.save(
        {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, checkpoint_id=folder, no_dist=True
    )
    (folder / ".metadata").write_bytes(METADATA[name])
    with pytest.raises(ValueError, match=r"a\.ckpt/\.metadata' (is not whole|holds a)") as caught:
        load_weights(nn.Linear(2, 2), folder)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", ""])
def test_names_that_point_outside(name, tmp_path):
    """Of the metadata of a directory, a manifest, an index of safetensors files."""
    folder = tmp_path / "a.ckpt"
    dcp.save(
        {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, checkpoint_id=folder, no_dist=True
    )
    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    whole_one = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="points outside of it"):
        load_weights(nn.Linear(2, 2), folder)
    (folder / ".metadata").write_bytes(whole_one)
    files = {name: {"bytes": 1, "sha256": "0"}}
    manifest = {"format": FORMAT, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="points outside of it"):
        load_weights(nn.Linear(2, 2), folder)
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ValueError, match="points outside of it"):
        load_weights(nn.Linear(2, 2), index)


def test_files_of_others_without_checksums(tmp_path):
    """Safetensors files, and files of torch.save that were asked to have none, are read."""
    state = nn.Linear(2, 2).state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("a.safetensors", "a.pt"):
        module = nn.Linear(2, 2)
        load_weights(module, tmp_path / name)
        assert torch.equal(module.weight, state["weight"])
    assert read_torch_file(tmp_path / "a.pt").keys() == state.keys()
    compare_all(read_safetensors(tmp_path / "a.safetensors"))


@pytest.mark.parametrize("kind", ["external storage", "external link", "virtual"])
def test_arrays_outside_of_an_hdf5_file(kind, tmp_path):
    """A file of fields holds its fields; it may not have those of other files read."""
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["x"] = np.ones((1, 1, 2, 2), np.float32)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if kind == "external storage":
            file.create_dataset("x", (1, 1, 2, 2), "f4", external=[(str(secret), 0, 16)])
        elif kind == "external link":
            file["x"] = h5py.ExternalLink(str(secret), "x")
        else:
            layout = h5py.VirtualLayout((1, 1, 2, 2), "f4")
            layout[:] = h5py.VirtualSource(str(secret), "x", (1, 1, 2, 2))
            file.create_virtual_dataset("x", layout)
    with pytest.raises(ValueError, match=r"a\.h5 .*outside of it"):
        FieldFile(tmp_path / "a.h5").arrays["x"]
