"""Checkpoints as directories: each rank writes its part with torch.distributed.checkpoint.

    name.ckpt/
      manifest.json     mesh, versions, hyperparameters, and size and hash of each other file
      meta.pt           what holds no sharded tensors, as in Lightning's file
      .metadata, *.distcp   `state_dict`, `optimizer_0`, ... as Lightning's ModelParallelStrategy

A directory is written as `name.ckpt.partial` and renamed when all ranks have written, so what has
its final name is whole.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from lightning_shard.atomic import partial_of, put_in_place, remove
from lightning_shard.dcp_files import METADATA, read_dcp
from lightning_shard.ranks import all_stop, gather_to_first, together
from lightning_shard.stored import StoredState, StoredTensor
from lightning_shard.weight_files import WEIGHTS_KEYS, read_torch_file

MANIFEST = "manifest.json"
REST = "meta.pt"
FORMAT = "lightning_shard 1"
_EXTRA = "extra"  # DTensors from elsewhere than weights and optimizers
_MARK = "lightning_shard.extra"


def is_sharded(path: str | Path) -> bool:
    """Whether `path` is a directory of torch.distributed.checkpoint."""
    return (Path(path) / METADATA).is_file()


def split_off(checkpoint: Mapping[str, Any], names: list[list[str]]) -> tuple[dict, dict]:
    """What torch.distributed.checkpoint writes of a checkpoint, and the rest.

    Args:
        checkpoint: A Lightning checkpoint with DTensors.
        names: The names of each optimizer's parameters.
    """
    rest = dict(checkpoint)
    tensors: dict[str, Any] = {"state_dict": dict(rest.pop("state_dict"))}
    for number, state in enumerate(rest.pop("optimizer_states", [])):
        tensors[f"optimizer_{number}"] = _by_name(state, names[number])
        rest["optimizers"] = number + 1
    extra: dict[str, Any] = {}
    rest = _take_out(rest, extra)
    return tensors | ({_EXTRA: extra} if extra else {}), rest


def _by_name(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    groups = [{**g, "params": [names[i] for i in g["params"]]} for g in state["param_groups"]]
    return {"state": {names[i]: v for i, v in state["state"].items()}, "param_groups": groups}


def _take_out(value: Any, extra: dict[str, Any]) -> Any:
    """`value` with marks in place of its DTensors, which go into `extra`."""
    if isinstance(value, DTensor):
        extra[name := str(len(extra))] = value
        return {_MARK: name}
    if isinstance(value, dict):
        return {key: _take_out(v, extra) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_out(v, extra) for v in value)
    return value


def _put_back(value: Any, extra: Mapping[str, StoredTensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_MARK}:
            return extra[value[_MARK]].whole()
        return {key: _put_back(v, extra) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_back(v, extra) for v in value)
    return value


def write(path: Path, tensors: dict, rest: dict, about: dict) -> None:
    """Write what `split_off` gave; all ranks call it, and all raise if one of them fails.

    Args:
        path: The final name; what has it is replaced when all ranks have written.
        tensors: Each rank's shards.
        rest: Only rank 0's is written.
        about: What the manifest says of the run.
    """
    partial = _begin(path)
    with _cleaned_up(partial):
        save(tensors, storage_writer=FileSystemWriter(partial))
        _finish(path, rest, about)


def write_later(
    path: Path, tensors: dict, rest: dict, about: dict, group: dist.ProcessGroup
) -> Future:
    """The same in a thread, of a copy of the shards in CPU memory.

    Args:
        path: As for `write`, like `tensors`, `rest` and `about`.
        tensors: May change when this has returned.
        rest: Must not change.
        about: Must not change.
        group: Of all ranks, for CPU tensors and nothing else.
    """
    partial = _begin(path)
    written: Any = async_save(
        tensors, storage_writer=FileSystemWriter(partial), process_group=group
    )

    def wait_and_finish() -> None:
        with _cleaned_up(partial):
            written.result()
            _finish(path, rest, about, group)

    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    done = executor.submit(wait_and_finish)
    executor.shutdown(wait=False)
    return done


def _begin(path: Path) -> Path:
    """An empty directory to write into, instead of one that a killed run left."""
    partial = partial_of(path)

    def prepare() -> None:
        if dist.get_rank() == 0:
            remove(partial)
            partial.mkdir(parents=True)

    together(prepare)
    return partial


@contextlib.contextmanager
def _cleaned_up(partial: Path) -> Iterator[None]:
    """Inside, an error of any rank is raised on all of them, after all have written."""
    try:
        yield
    except (Exception, CheckpointException) as err:
        if dist.get_rank() == 0:
            remove(partial)
        if isinstance(err, CheckpointException):  # no Exception, and a report of several pages
            rank, (first, _) = min(err.failures.items())
            raise RuntimeError(all_stop(rank, first)) from err
        raise


def _finish(path: Path, rest: dict, about: dict, group: dist.ProcessGroup | None = None) -> None:
    """Add the rest and the manifest, and give the directory its name."""
    partial = partial_of(path)
    own: dict[str, Any] = {}
    together(lambda: own.update(_own_files(partial)), group)
    gathered = gather_to_first(own, group)

    def complete() -> None:
        if dist.get_rank() > 0:
            return
        torch.save(rest, partial / REST)
        files = {name: entry for entries in gathered for name, entry in entries.items()}
        files |= {name: _described(partial / name) for name in (REST, METADATA)}
        text = json.dumps({"format": FORMAT, **about, "files": files}, indent=1, default=str)
        with (partial / MANIFEST).open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(partial, path)

    together(complete, group)


def _own_files(folder: Path) -> dict[str, Any]:
    return {p.name: _described(p) for p in folder.glob(f"__{dist.get_rank()}_*")}


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What the manifest says, or None for a directory that another strategy wrote.

    Raises:
        ValueError: It is not whole.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT or not isinstance(manifest["files"], dict):
            raise ValueError(f"format {manifest['format']}")
    except (ValueError, KeyError, TypeError) as err:
        raise ValueError(f"'{path}' is no manifest of {FORMAT}: {err}.") from err
    return manifest


def problem_of(folder: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """Why the directory is not whole, or None; each of several ranks reads its share of files."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    for number, (name, entry) in enumerate(sorted(manifest["files"].items())):
        path = folder / name
        if not path.is_file():
            return f"'{name}' is missing"
        if path.stat().st_size != entry.get("bytes"):
            return f"'{name}' has {path.stat().st_size} bytes instead of {entry.get('bytes')}"
        if not entry.get("sha256"):
            return f"the manifest has no hash of '{name}'"
        if number % ranks == rank and _described(path)["sha256"] != entry["sha256"]:
            return f"'{name}' is not what was written (its hash differs)"
    return None


def check(folder: Path) -> None:
    """All ranks call it, and each reads its share of the files.

    Raises:
        ValueError: The directory is not whole.
    """
    if problem := problem_of(folder, dist.get_rank(), dist.get_world_size()):
        raise ValueError(f"'{folder}' is incomplete: {problem}; take an earlier checkpoint.")
    if not is_sharded(folder):
        raise ValueError(f"'{folder}' is a directory without a checkpoint in it.")


def read_directory(folder: Path, weights_only: bool = True) -> dict[str, Any]:
    """A Lightning checkpoint from a directory of ours or of Lightning's.

    Weights are a `StoredState` and tensors of optimizers are `StoredTensor`s: they are read when
    they are needed, and each rank reads its part.

    Raises:
        ValueError: It is not whole.
    """
    tree = read_dcp(folder)
    rest = read_torch_file(folder / REST, weights_only) if (folder / REST).is_file() else {}
    if FORMAT.split()[0] in rest and read_manifest(folder) is None:
        raise ValueError(
            f"'{folder}' is incomplete: '{MANIFEST}' is missing; take an earlier checkpoint."
        )
    checkpoint = _put_back(rest, tree.pop(_EXTRA, {}))
    states = [tree.pop(name) for name in _optimizers(tree)]
    checkpoint.pop("optimizers", None)
    if states:
        checkpoint["optimizer_states"] = [{"state": {}, **state} for state in states]
    key = next((key for key in WEIGHTS_KEYS if isinstance(tree.get(key), dict)), None)
    return checkpoint | {"state_dict": StoredState(tree[key] if key else tree)}


def _optimizers(tree: Mapping[str, Any]) -> list[str]:
    names = [name for name in tree if name.startswith("optimizer_")]
    return sorted(names, key=lambda name: int(name.removeprefix("optimizer_")))
