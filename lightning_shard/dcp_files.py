"""Directories of torch.distributed.checkpoint, read without a process group and without pickle.

Their metadata are a pickle, which could run any code: here only the classes that such metadata
consist of are built. Each tensor becomes a `StoredTensor`, so that a rank reads the chunks that
overlap with its part.
"""

import io
import pickle
from collections.abc import Mapping
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_shard.stored import Region, StoredTensor

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}filesystem", "_StorageInfo"),
    *(
        (f"{_DCP}metadata", name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
            "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _ALLOWED or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint's metadata")


def _member(kind: Any, name: str) -> Any:
    """A member of an enumeration, as Python 3.11.0 to 3.11.3 writes it: by `getattr`."""
    if isinstance(kind, EnumType) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"{kind}.{name} is not part of a checkpoint's metadata")


def read_dcp(folder: Path) -> dict[str, Any]:
    """The nested dicts and lists that were saved, with `StoredTensor`s in place of tensors.

    Raises:
        ValueError: The metadata are not whole, or hold anything but metadata.
    """
    metadata = _read_metadata(folder)
    places = {(i.fqn, i.offset): place for i, place in (metadata.storage_data or {}).items()}
    tree: dict[Any, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        value: Any
        if isinstance(entry, TensorStorageMetadata):
            value = _stored(folder, name, entry, places)
        else:
            data = _bytes_of(folder, places[name, None])
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        *path, last = (metadata.planner_data or {}).get(name, (name,))
        branch = tree
        for key in path:
            branch = branch.setdefault(key, {})
        branch[last] = value
    return _with_lists(tree)


def _read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as err:
        raise ValueError(f"'{path}' is not whole, or no metadata of torch's ({err}).") from err
    if not isinstance(metadata, Metadata):
        raise ValueError(f"'{path}' holds a {type(metadata).__name__}, no metadata of torch's.")
    return metadata


def _stored(
    folder: Path, name: str, entry: TensorStorageMetadata, places: Mapping[Any, Any]
) -> StoredTensor:
    dtype = entry.properties.dtype

    def read(region: Region) -> Tensor:
        out = torch.empty([r.stop - r.start for r in region], dtype=dtype)
        found = 0
        for chunk in entry.chunks:
            overlap = [
                slice(max(r.start, low), min(r.stop, low + n))
                for r, low, n in zip(region, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(part.start >= part.stop for part in overlap):
                continue
            data = _bytes_of(folder, places[name, chunk.offsets])
            whole = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            target = out[_shifted(overlap, [r.start for r in region])]
            target.copy_(whole[_shifted(overlap, chunk.offsets)])
            found += target.numel()
        if found != out.numel():
            raise ValueError(f"'{folder}' lacks a part of '{name}'; take an earlier checkpoint.")
        return out

    return StoredTensor(entry.size, dtype, read)


def _shifted(region: list[slice], origin: Any) -> Region:
    return tuple(slice(r.start - low, r.stop - low) for r, low in zip(region, origin, strict=True))


def _bytes_of(folder: Path, place: Any) -> bytes:
    if getattr(place, "transform_descriptors", None):
        raise ValueError(
            f"'{folder}' is compressed by an extension of torch.distributed.checkpoint."
        )
    path = folder / place.relative_path
    if not path.is_file():
        raise ValueError(f"'{folder}' lacks '{place.relative_path}'; take an earlier checkpoint.")
    with path.open("rb") as file:
        file.seek(place.offset)
        data = file.read(place.length)
    if len(data) != place.length:
        raise ValueError(f"'{path}' is cut off; take an earlier checkpoint.")
    return data


def _with_lists(tree: Any) -> Any:
    """Dicts whose keys are 0, 1, ... were lists, except optimizer states."""
    if not isinstance(tree, dict):
        return tree
    items = {
        key: {k: _with_lists(v) for k, v in value.items()}
        if key == "state" and isinstance(value, dict)
        else _with_lists(value)
        for key, value in tree.items()
    }
    if items and list(items) == list(range(len(items))):
        return list(items.values())
    return items
