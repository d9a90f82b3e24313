"""Weights in files, read when they are asked for: safetensors, what `torch.save` wrote, and DCP.

Nothing in a file is executed: what `torch.load(weights_only=True)` refuses is refused here.
"""

import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_shard.dcp_files import METADATA, read_dcp
from lightning_shard.stored import Region, StoredTensor

INDEX_SUFFIX = ".safetensors.index.json"
SAFETENSORS = (".safetensors", INDEX_SUFFIX)  # the ends of the names
# where programs keep the weights in a file that holds more: Lightning, then others
REMEDY = "if you trust the file pass weights_only=False to trainer.fit (or validate, test, predict)"
WEIGHTS_KEYS = ("state_dict", "model_state_dict", "model", "module")


class UnsafeFileError(ValueError):
    """A file holds an object whose building could run code.

    Args:
        path: The file.
        found: The class of the object.
        remedy: What to do about it.
    """

    def __init__(self, path: str, found: str, remedy: str = REMEDY) -> None:
        self.path, self.found = path, found
        super().__init__(
            f"'{path}' holds a {found} besides tensors and plain values, and building it could run "
            f"code: {remedy}, or allow the class by torch.serialization.add_safe_globals."
        )


def stored_weights(path: str | Path) -> dict[str, Any]:
    """The weights in a file, by name: `StoredTensor`s, and entries that are no tensors as they are.

    Args:
        path: A safetensors file, the index of several (`*.safetensors.index.json`), or a file of
            `torch.save`: a state dict, or a Lightning checkpoint; or a directory of
            torch.distributed.checkpoint.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not whole, of another kind, or holds objects that would run code.
    """
    path = Path(path)
    if (path / METADATA).is_file():
        return dict(weights_of(read_dcp(path), path))
    if path.name.endswith(INDEX_SUFFIX):
        return _several_safetensors(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    loaded = read_torch_file(path)
    weights = weights_of(loaded, path)
    return {k: _in_memory(v) if isinstance(v, Tensor) else v for k, v in weights.items()}


def weights_of(loaded: Any, path: object) -> Mapping[str, Any]:
    """The state dict in what a file of `torch.save` holds.

    Raises:
        ValueError: There is none.
    """
    if isinstance(loaded, Mapping):
        for key in WEIGHTS_KEYS:
            inner = loaded.get(key)
            if isinstance(inner, Mapping):
                return inner
        if any(isinstance(value, Tensor) for value in loaded.values()):
            return loaded
    raise ValueError(
        f"'{path}' holds no weights: expected a dict of tensors by name, or one under a key of "
        f"{', '.join(WEIGHTS_KEYS)}; got {_described(loaded)}."
    )


def _described(loaded: Any) -> str:
    if isinstance(loaded, Mapping):
        return f"the keys {', '.join(map(str, list(loaded)[:8])) or '(none)'}"
    return f"a {type(loaded).__name__}"


def read_torch_file(path: str | Path, weights_only: bool = True) -> Any:
    """What `torch.save` wrote, its tensors mapped into memory and not read before they are used.

    Args:
        path: A local file.
        weights_only: False lets the file run code; only for files that you trust.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not whole, of another kind, or needs `weights_only=False`.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file '{path}'.")
    mapped = zipfile.is_zipfile(path)  # torch before 1.6 wrote no zip files
    try:
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=weights_only)
    except (RuntimeError, EOFError, OSError, KeyError, ValueError, pickle.UnpicklingError) as err:
        if found := re.search(r"(?:GLOBAL|class) ([\w.]+) ", str(err)):
            raise UnsafeFileError(str(path), found[1]) from err
        raise ValueError(
            f"'{path}' is not whole, or no file of torch.save; copy it again, or take an earlier "
            "checkpoint."
        ) from err


def _in_memory(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tensor.shape, tensor.dtype, lambda region: tensor[region])


def _safetensors(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file '{path}'.")
    try:
        file = safe_open(path, framework="pt")
        paired = set(json.loads((file.metadata() or {}).get("complex", "[]")))
        names = file.keys()
        return {name: _slice_of(file, name, name in paired) for name in names}
    except SafetensorError as err:
        raise ValueError(f"'{path}' is not whole, or no safetensors file ({err}).") from err


def _slice_of(file: Any, name: str, paired: bool) -> StoredTensor:
    part = file.get_slice(name)
    shape = torch.Size(part.get_shape())
    empty = part[tuple(slice(0, 0) for _ in shape)] if shape else file.get_tensor(name)
    if not paired:
        read = (lambda region: part[region]) if shape else (lambda _: file.get_tensor(name))
        return StoredTensor(shape, empty.dtype, read)

    def read_pairs(region: Region) -> Tensor:
        return torch.view_as_complex(part[*region, slice(0, 2)])

    return StoredTensor(shape[:-1], empty.dtype.to_complex(), read_pairs)


def _several_safetensors(index: Path) -> dict[str, StoredTensor]:
    if not index.is_file():
        raise FileNotFoundError(f"there is no file '{index}'.")
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError) as err:
        raise ValueError(f"'{index}' is no index of safetensors files: {err}.") from err
    return {k: v for file in files for k, v in _safetensors(index.parent / file).items()}
