"""Saves checkpoints as directories, into which each rank writes its part.

    name.ckpt/
      manifest.json     mesh, versions, hyperparameters, and size and hash of each other file
      meta.pt           what holds no sharded tensors, as in Lightning's file
      .metadata, *.distcp   `state_dict`, `optimizer_0`, ... as Lightning's ModelParallelStrategy

A directory is written as `name.ckpt.partial` and renamed when all ranks have written, so what has
its final name is whole.
"""

import contextlib
import json
import os
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import futures
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult

from lightning_shard.checkpoint.dcp_reader import METADATA, Files, read_dcp
from lightning_shard.checkpoint.errors import EARLIER, DamagedError, UnsafeFileError
from lightning_shard.checkpoint.foreign import WEIGHTS_KEYS
from lightning_shard.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    compared_with,
    problem_of,
    read_manifest,
    size_and_hash,
)
from lightning_shard.checkpoint.prepared import save_whole
from lightning_shard.checkpoint.state import put_back, take_out
from lightning_shard.checkpoint.stored import StoredState
from lightning_shard.checkpoint.torch_file import read_torch_file
from lightning_shard.data.atomic import (
    disk_errors,
    partial_of,
    put_in_place,
    refuse_folder,
    remove,
    remove_leftovers,
)
from lightning_shard.processes.errors_together import all_stop, gather_to_first, together
from lightning_shard.processes.narrow import is_dict

REST = "meta.pt"
EXTRA = "extra"  # DTensors from elsewhere than weights and optimizers
Tree = dict[str, Any]


def is_sharded(path: str | Path) -> bool:
    """Say whether `path` is a directory of torch.distributed.checkpoint."""
    return (Path(path) / METADATA).is_file()


def no_checkpoint(path: Path) -> str:
    """Return a sentence on a directory that is none, with the checkpoints that are in it."""
    inside = ", ".join(sorted(x.name for x in path.glob("*.ckpt") if x.exists()))
    if inside:
        return f"'{path}' is a folder of checkpoints; name one of them: {inside}."
    return f"'{path}' is a directory without a checkpoint in it."


def write(path: Path, tensors: Tree, rest: Tree, about: Tree) -> None:
    """Write what `split_off` gave. All ranks call it, and all raise if one of them fails.

    Args:
        path: The final name; what has it is replaced when all ranks have written.
        tensors: Each rank's shards.
        rest: The remaining content; only that of rank 0 is written.
        about: Entries of the manifest about the run.
    """
    partial = _begin(path)
    with _cleaned_up(partial):
        save(tensors, storage_writer=Writer(partial, path))
        _finish(partial, path, rest, about)


def write_later(
    path: Path, tensors: Tree, rest: Tree, about: Tree, group: dist.ProcessGroup
) -> Future[None]:
    """Copy the shards to CPU memory, and write them in a thread while training goes on.

    Args:
        path: The final name; what has it is replaced when all ranks have written.
        tensors: Each rank's shards, which may change when this has returned.
        rest: The remaining content, which rank 0 writes. It must not change before the result is
            there.
        about: Entries of the manifest about the run. It must not change either.
        group: A group of all ranks that carries CPU tensors and that nothing else uses.

    Returns:
        The writing; its `result` raises on all ranks if one of them failed.
    """
    partial = _begin(path)
    writer = Writer(partial, path)
    written: Any = async_save(tensors, storage_writer=writer, process_group=group)

    def wait_and_finish() -> None:
        with _cleaned_up(partial):
            written.result()
            _finish(partial, path, rest, about, group)

    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    done = executor.submit(wait_and_finish)
    executor.shutdown(wait=False)
    return done


class Writer(FileSystemWriter):
    """Writes as torch does, and names the checkpoint and the cause in errors of the disk."""

    def __init__(self, partial: Path, path: Path) -> None:
        super().__init__(partial)
        self.final = path

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> futures.Future[list[WriteResult]]:
        """Write this rank's shards."""
        with disk_errors(self.final):
            return super().write_data(plan, planner)


def _begin(path: Path) -> Path:
    """An empty directory to write into, of the same name on all ranks."""
    partial = [partial_of(path)]

    def prepare() -> None:
        if dist.get_rank() == 0:
            with disk_errors(path):
                refuse_folder(path)
                partial[0].mkdir(parents=True)
                remove_leftovers(path.parent)

    together(prepare)
    dist.broadcast_object_list(partial)
    return partial[0]


@contextlib.contextmanager
def _cleaned_up(partial: Path) -> Generator[None]:
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


def _finish(
    partial: Path, path: Path, rest: Tree, about: Tree, group: dist.ProcessGroup | None = None
) -> None:
    """Add the rest and the manifest, and give the directory its name."""
    own: dict[str, Any] = {}
    together(lambda: own.update(_own_files(partial)), group)
    gathered = gather_to_first(own, group)

    def complete() -> None:
        if dist.get_rank() > 0:
            return
        with disk_errors(path):
            with (partial / REST).open("wb") as file:
                save_whole(rest, file)
            files = {name: entry for entries in gathered for name, entry in entries.items()}
            files |= {name: size_and_hash(partial / name) for name in (REST, METADATA)}
            text = json.dumps({"format": FORMAT, **about, "files": files}, indent=1, default=str)
            with (partial / MANIFEST).open("w") as text_file:
                text_file.write(text)
                text_file.flush()
                os.fsync(text_file.fileno())
            put_in_place(partial, path)

    together(complete, group)


def _own_files(folder: Path) -> dict[str, Any]:
    return {p.name: size_and_hash(p) for p in folder.glob(f"__{dist.get_rank()}_*")}


def check(folder: Path) -> None:
    """Compare the files with the manifest. All ranks call it, and each reads its share of them.

    Raises:
        DamagedError: The directory is not whole.
    """
    if problem := problem_of(folder, dist.get_rank(), dist.get_world_size()):
        raise DamagedError(f"'{folder}' is incomplete: {problem}; {EARLIER}.")
    if not is_sharded(folder):
        raise DamagedError(no_checkpoint(folder))


def read_directory(
    folder: Path, weights_only: bool = True, *, checked: bool = False
) -> dict[str, Any]:
    """Read a Lightning checkpoint from a directory of ours or of Lightning's.

    Weights are a `StoredState` and tensors of optimizers are `StoredTensor`s: they are read when
    they are needed, and each rank reads its part.

    Args:
        folder: The directory.
        weights_only: True refuses objects in it that could run code.
        checked: True if `check` has compared the files. Otherwise each file is compared with the
            manifest when it is first read.

    Raises:
        DamagedError: It is not whole.
        UnsafeFileError: It needs `weights_only=False`.
    """
    manifest, files = _opened(folder, checked)
    tree = read_dcp(files)
    rest = _rest(files, manifest, weights_only)
    checkpoint = put_back(rest, tree.pop(EXTRA, {}))
    states = [tree.pop(name) for name in _optimizers(tree)]
    checkpoint.pop("optimizers", None)
    if states:
        checkpoint["optimizer_states"] = [{"state": {}, **state} for state in states]
    return checkpoint | {"state_dict": StoredState(_weights_in(tree))}


def read_weights(folder: Path) -> dict[str, Any]:
    """Read the weights by name, as `StoredTensor`s; objects beside them are not built.

    Raises:
        DamagedError: It is not whole.
    """
    manifest, files = _opened(folder, checked=False)
    tree = read_dcp(files)
    if manifest is None:
        with contextlib.suppress(UnsafeFileError):  # then nothing says whose directory it is
            _rest(files, manifest, weights_only=True)
    return _weights_in(tree)


def _opened(folder: Path, checked: bool) -> tuple[dict[str, Any] | None, Files]:
    manifest = read_manifest(folder)
    if manifest is None or checked:
        return manifest, Files(folder)
    return manifest, Files(folder, compared_with(folder, manifest))


def _rest(files: Files, manifest: dict[str, Any] | None, weights_only: bool) -> dict[str, Any]:
    path = files.folder / REST
    if not path.is_file():
        return {}
    files.read(REST, length=0)  # so that it is compared
    rest: Any = read_torch_file(path, weights_only)
    if not is_dict(rest):
        raise DamagedError(f"'{path}' holds a {type(rest).__name__}, not what a run leaves there.")
    if manifest is None and FORMAT.split()[0] in rest:
        raise DamagedError(f"'{files.folder}' is incomplete: '{MANIFEST}' is missing; {EARLIER}.")
    return rest


def _weights_in(tree: Mapping[str, Any]) -> dict[str, Any]:
    key = next((key for key in WEIGHTS_KEYS if isinstance(tree.get(key), dict)), None)
    return tree[key] if key else dict(tree)


def _optimizers(tree: Mapping[str, Any]) -> list[str]:
    names = [name for name in tree if name.startswith("optimizer_")]
    return sorted(names, key=lambda name: int(name.removeprefix("optimizer_")))


def split_off(checkpoint: Mapping[str, Any], names: list[list[str]]) -> tuple[Tree, Tree]:
    """Part a checkpoint into what torch.distributed.checkpoint writes, and the rest.

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
    rest = take_out(rest, extra)
    return tensors | ({EXTRA: extra} if extra else {}), rest


def _by_name(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    held: list[Tree] = state["param_groups"]
    groups = [{**g, "params": [names[i] for i in g["params"]]} for g in held]
    return {"state": {names[i]: v for i, v in state["state"].items()}, "param_groups": groups}
