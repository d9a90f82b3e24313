"""Values in a checkpoint that no run writes are one sentence, at once."""

import json
import pickle
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from lightning_shard import load_weights
from lightning_shard.checkpoint.foreign import as_lightning
from lightning_shard.checkpoint.manifest import FORMAT
from lightning_shard.cli.main import main
from lightning_shard.trainer.checkpoint_io import CheckpointFiles

# levels; Python 3.12 pickles less than 900, whatever its limit of recursion is
DEEP = 700 if sys.version_info[:2] == (3, 12) else 3000
GOOD = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}


@pytest.fixture(autouse=True)
def in_its_own_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def repeated(kind: str) -> Any:
    """9 ** 14 values in a kilobyte, or values without an end."""
    value: Any = ["x"]
    if kind == "endless list":
        value.append(value)
    elif kind == "endless dict":
        value = {}
        value["again"] = value
    else:
        for _ in range(DEEP if kind == "deep" else 14):
            again = [value] * (1 if kind == "deep" else 9)
            value = {str(i): v for i, v in enumerate(again)} if kind == "dicts" else again
    return value


def by_ckpt_path(path: str) -> None:
    as_lightning(CheckpointFiles().load_checkpoint(path), path, GOOD)


ENTRIES: dict[str, Callable[[str], None]] = {
    "ckpt_path": by_ckpt_path,
    "load_weights": lambda path: load_weights(nn.Linear(2, 2), path),
    "inspect": lambda path: main(["inspect", path]),
    "export": lambda path: main(["export", path, "out.ckpt"]),
}


def refusal(entry: str, path: str, capsys: Any) -> str:
    """The one sentence of an entry that must refuse a file."""
    start = time.process_time()
    with pytest.raises((ValueError, SystemExit)) as caught:
        ENTRIES[entry](path)
    assert time.process_time() - start < 20  # without a limit it never ends
    written = capsys.readouterr()
    assert "Traceback" not in written.err
    text = str(caught.value) if isinstance(caught.value, ValueError) else written.err + written.out
    assert path in text
    assert len(text.strip().splitlines()) == 1, text
    return text


@pytest.mark.parametrize("kind", ["lists", "dicts", "endless list", "endless dict", "deep"])
@pytest.mark.parametrize("place", ["hyper_parameters", "optimizer_states", "state_dict"])
def test_values_that_repeat_each_other(kind, place, capsys):
    content: dict[str, Any] = {"state_dict": dict(GOOD)}
    if place == "state_dict":
        content[place]["more"] = repeated(kind)
    else:
        content[place] = {"a": repeated(kind)}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        torch.save(content, "evil.ckpt")
    finally:
        sys.setrecursionlimit(limit)
    for entry in ENTRIES:
        text = refusal(entry, "evil.ckpt", capsys)
        assert "more than 200 levels" in text or "repeats its" in text


def state(**changed: Any) -> dict[str, Any]:
    return {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}], **changed}


LAYOUTS = {
    "names that are numbers": {"state_dict": {1: torch.ones(2)}},
    "weights without numbers": {"state_dict": {"weight": torch.empty(2, 2, device="meta")}},
    "weights that are a list": {"state_dict": [torch.ones(2)]},
    "a number of optimizers": {"optimizer_states": 3},
    "an optimizer that is a list": {"optimizer_states": [[1]]},
    "optimizers by name": {"optimizer_states": {"a": state()}},
    "state that is a list": {"optimizer_states": [state(state=[1])]},
    "state of a parameter that is a number": {"optimizer_states": [state(state={0: 1})]},
    "groups that are a number": {"optimizer_states": [state(param_groups=3)]},
    "a group without parameters": {"optimizer_states": [state(param_groups=[{"lr": 1.0}])]},
    "hyperparameters that are a list": {"hyper_parameters": [1]},
    "our own entry": {"lightning_shard": 3},
    "our own mesh": {"lightning_shard": {"mesh": [1]}},
    "our own versions": {"lightning_shard": {"versions": 3}},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout(name, capsys):
    torch.save({"state_dict": GOOD} | LAYOUTS[name], "odd.ckpt")
    for entry in ENTRIES:
        if entry != "load_weights" or "state_dict" in LAYOUTS[name]:
            refusal(entry, "odd.ckpt", capsys)


HUGE = {
    "one number as 2 ** 40": torch.ones(1).expand(2**40),
    "sparse": torch.ones(2, 2).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@pytest.mark.parametrize("name", HUGE)
def test_what_safetensors_cannot_hold(name, capsys):
    torch.save({"state_dict": {**GOOD, "more": HUGE[name]}}, "odd.ckpt")
    with pytest.raises(SystemExit) as stop:
        main(["export", "odd.ckpt", "out.safetensors"])
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error: 'out.safetensors' cannot be written: " in error
    assert [path.name for path in Path().iterdir()] == ["odd.ckpt"]


@pytest.mark.parametrize("shape", [[], [3], [2, 0]])
def test_pairs_that_are_none(shape, capsys):
    size = 4 * torch.Size(shape).numel()
    header = json.dumps({
        "__metadata__": {"complex": '["weight"]'},
        "weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]},
    }).encode()  # fmt: skip
    Path("a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    for entry in ("load_weights", "inspect", "export"):
        assert "its header was changed" in refusal(entry, "a.safetensors", capsys)


def test_names_do_not_command_the_terminal(capsys):
    evil = "\x1b[2Jgone\r\n\x9b2J"
    torch.save({"state_dict": {evil: torch.ones(2)}, "hyper_parameters": {evil: 1}}, "odd.ckpt")
    main(["inspect", "odd.ckpt"])
    written = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in written), written
    assert written.count("gone") == 2
    with pytest.raises(RuntimeError, match="does not fit") as caught:
        load_weights(nn.Linear(2, 2), "odd.ckpt")
    assert str(caught.value).isprintable()


def half(row: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((1, 2)))


METADATA: dict[str, Callable[[Metadata, Any], None]] = {
    "a chunk a million times": lambda _, weight: weight.chunks.extend(weight.chunks * 10**6),
    "a chunk twice and another missing": lambda _, w: setattr(w, "chunks", [half(0), half(0)]),
    "chunks of more than there is": lambda _, weight: weight.chunks.append(half(1)),
    "no chunk": lambda _, weight: weight.chunks.clear(),
    "sizes below zero": lambda _, weight: setattr(weight, "size", torch.Size((-2, 2))),
    "larger than any memory": lambda _, w: setattr(w, "size", torch.Size((2**40, 2**20))),
    "weights that are a list": lambda m, _: setattr(
        m, "planner_data", {name: (number,) for number, name in enumerate(m.state_dict_metadata)}
    ),
    "a name of a million parts": lambda m, _: setattr(
        m, "planner_data", {"state_dict.weight": ("state_dict",) * 10**5}
    ),
}


@pytest.mark.slow_rows("a chunk a million times")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_directories(name, capsys):
    dcp.save({"state_dict": GOOD}, checkpoint_id="evil.ckpt", no_dist=True)
    path = Path("evil.ckpt/.metadata")
    metadata = pickle.loads(path.read_bytes())
    METADATA[name](metadata, metadata.state_dict_metadata["state_dict.weight"])
    path.write_bytes(pickle.dumps(metadata))
    for entry in ("load_weights", "inspect", "export"):
        refusal(entry, "evil.ckpt", capsys)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("key", ["mesh", "versions", "hyper_parameters"])
def test_a_manifest_of_another_kind(key, capsys):
    dcp.save({"state_dict": GOOD}, checkpoint_id="evil.ckpt", no_dist=True)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path.read_bytes()).hexdigest()}
        for path in Path("evil.ckpt").iterdir()
    }
    manifest = {"format": FORMAT, "files": files, key: [1]}
    Path("evil.ckpt/manifest.json").write_text(json.dumps(manifest))
    for entry in ("load_weights", "inspect", "export"):
        refusal(entry, "evil.ckpt", capsys)
