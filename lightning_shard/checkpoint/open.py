"""Opens checkpoints of any kind for tools that look into them or convert them."""

import zipfile
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_shard.checkpoint.directory import REST, is_sharded, no_checkpoint, read_directory
from lightning_shard.checkpoint.foreign import as_lightning
from lightning_shard.checkpoint.manifest import problem_of, read_manifest
from lightning_shard.checkpoint.safetensors_file import SAFETENSORS, compare_all, read_safetensors
from lightning_shard.checkpoint.stored import StoredState, StoredTensor, tensors_in
from lightning_shard.checkpoint.torch_file import read_torch_file
from lightning_shard.processes.narrow import is_dict


@dataclass(frozen=True)
class Opened:
    """Holds what is in a checkpoint, and whether it is whole.

    Attributes:
        kind: The kind of the checkpoint, in words.
        content: A Lightning checkpoint; `StoredTensor`s or mapped tensors.
        problem: None, or why it is not whole.
        manifest: The manifest of a sharded directory, empty for others.
    """

    kind: str
    content: dict[str, Any]
    problem: str | None
    manifest: dict[str, Any]


def open_checkpoint(path: Path, *, trusted: bool = False) -> Opened:
    """Open a checkpoint, all of which is compared with its checksums.

    Args:
        path: A file of `torch.save`, safetensors, or a directory of torch.distributed.checkpoint.
        trusted: True lets objects in it be built, which can run code.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It cannot be read.
    """
    if path.is_dir():
        return _directory(path, trusted)
    if path.name.endswith(SAFETENSORS):
        tensors = read_safetensors(path)
        compare_all(tensors)
        return Opened("safetensors", {"state_dict": StoredState(dict(tensors))}, None, {})
    loaded = read_torch_file(path, not trusted)
    content = as_lightning(loaded, path, ())
    kind = "Lightning checkpoint" if "pytorch-lightning_version" in loaded else "weights"
    return Opened(f"{kind}, one file", content, None, {})


def hyperparameters(path: Path, *, trusted: bool = False) -> dict[str, Any]:
    """Return the hyperparameters in a checkpoint; none where it needs code to be read.

    Args:
        path: A checkpoint; a file that is no zip archive, and one that is missing, have none.
        trusted: True for a file that may hold objects, which then has no hyperparameters.

    Raises:
        ValueError: The file cannot be read.
    """
    file = path / REST if path.is_dir() else path
    loaded: Any = None
    if zipfile.is_zipfile(file):
        with suppress(ValueError) if trusted else nullcontext():
            loaded = read_torch_file(file, only="data.pkl")
    found = loaded.get("hyper_parameters") if is_dict(loaded) else None
    return found if is_dict(found) else {}


def _directory(path: Path, trusted: bool) -> Opened:
    manifest = read_manifest(path) or {}
    if problem := problem_of(path):
        return Opened("sharded directory", {}, problem, manifest)
    if not is_sharded(path):
        raise ValueError(no_checkpoint(path))
    content = read_directory(path, not trusted, checked=True)
    if manifest:
        return Opened("sharded directory", content, None, manifest)
    for tensor in tensors_in(content):  # without a manifest only the parts have checksums
        if isinstance(tensor, StoredTensor):
            tensor.whole()
    return Opened("directory of torch.distributed.checkpoint", content, None, {})


def weights(opened: Opened) -> dict[str, Any]:
    """Give the weights by name, not read yet."""
    state = opened.content["state_dict"]
    return state.stored if isinstance(state, StoredState) else dict(state)
