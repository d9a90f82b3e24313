"""A checkpoint of any kind, opened without a trainer: a file, a directory, weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_shard.foreign import as_lightning
from lightning_shard.sharded_directory import is_sharded, problem_of, read_directory, read_manifest
from lightning_shard.stored import StoredState
from lightning_shard.weight_files import SAFETENSORS, read_torch_file, stored_weights


@dataclass(frozen=True)
class Opened:
    """What is in a checkpoint; its tensors are read when they are used.

    Attributes:
        kind: In words.
        content: A Lightning checkpoint; `StoredTensor`s or mapped tensors.
        problem: None, or why it is not whole.
        manifest: Of a sharded directory.
    """

    kind: str
    content: dict[str, Any]
    problem: str | None
    manifest: dict[str, Any]


def open_checkpoint(path: Path, *, trusted: bool = False) -> Opened:
    """Open a checkpoint.

    Args:
        path: A file of `torch.save`, safetensors, or a directory of torch.distributed.checkpoint.
        trusted: Whether objects in it may be built, which can run code.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It cannot be read.
    """
    if path.is_dir():
        problem = problem_of(path)
        manifest = read_manifest(path) or {}
        if problem:
            return Opened("sharded directory", {}, problem, manifest)
        if not is_sharded(path):
            raise ValueError(f"'{path}' is a directory without a checkpoint in it.")
        whose = "sharded directory" if manifest else "directory of torch.distributed.checkpoint"
        return Opened(whose, read_directory(path, not trusted), None, manifest)
    if path.name.endswith(SAFETENSORS):
        return Opened("safetensors", {"state_dict": StoredState(stored_weights(path))}, None, {})
    loaded = read_torch_file(path, not trusted)
    kind = "Lightning checkpoint" if "pytorch-lightning_version" in loaded else "weights"
    content = as_lightning(loaded, path, ())
    return Opened(f"{kind}, one file", content, None, {})


def weights(opened: Opened) -> dict[str, Any]:
    """The weights by name, not read yet."""
    state = opened.content["state_dict"]
    return state.stored if isinstance(state, StoredState) else dict(state)


def with_integer_keys(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state keyed as `Optimizer.state_dict` does, instead of by names."""
    held = [name for group in state["param_groups"] for name in group["params"]]
    index = {name: i for i, name in enumerate(held)}
    groups = [{**g, "params": [index[n] for n in g["params"]]} for g in state["param_groups"]]
    return {"state": {index[n]: v for n, v in state["state"].items()}, "param_groups": groups}
