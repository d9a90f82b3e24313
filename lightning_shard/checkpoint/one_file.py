"""Writes a checkpoint as one file for other programs, and reads each tensor when its turn comes."""

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.foreign import by_index, plain_name
from lightning_shard.checkpoint.open import Opened, weights
from lightning_shard.checkpoint.safetensors_file import in_order, write_safetensors
from lightning_shard.checkpoint.stored import StoredState, StoredTensor

Progress = Callable[[int], object]  # is told the bytes of each tensor that was read


def content_for(out: Path, opened: Opened) -> dict[str, Any]:
    """Return what the end of `out` chooses: weights, or for `.ckpt` a Lightning checkpoint."""
    if out.suffix == ".ckpt":
        states = opened.content.get("optimizer_states", [])
        keyed = [by_index(state, _names(state)) for state in states]
        return opened.content | ({"optimizer_states": keyed} if keyed else {})
    content = weights(opened)
    if out.suffix == ".safetensors":
        return {k: v for k, v in content.items() if isinstance(v, Tensor | StoredTensor)}
    return content


def write_content(content: dict[str, Any], out: Path, file: IO[bytes], progress: Progress) -> None:
    """Write the content to a file of the kind that the end of `out` chooses.

    Raises:
        RuntimeError | TypeError: torch cannot write a value in this format.
    """
    if out.suffix != ".safetensors":
        torch.save(_read(content, progress), file)
        return
    shapes = {name: tensor.shape for name, tensor in content.items()}
    dtypes = {name: tensor.dtype for name, tensor in content.items()}
    parts = (_read(content[name], progress) for name in in_order(content, dtypes))
    write_safetensors(file, shapes, dtypes, parts)


def _read(value: Any, progress: Progress) -> Any:
    """Read nested tensors."""
    if isinstance(value, Tensor | StoredTensor):
        whole = value.whole() if isinstance(value, StoredTensor) else value
        progress(whole.nbytes)
        return whole
    if isinstance(value, StoredState):
        value = value.stored
    if isinstance(value, dict):
        return {key: _read(v, progress) for key, v in value.items()}
    is_list = type(value) in (list, tuple)
    return type(value)(_read(v, progress) for v in value) if is_list else value


def _names(state: dict[str, Any]) -> list[list[str]]:
    return [[plain_name(str(name)) for name in g["params"]] for g in state["param_groups"]]
