"""Reads directories of torch.distributed.checkpoint without a process group and without pickle.

Their metadata are a pickle, which could run any code: here only the classes that such metadata
consist of are built. Each tensor becomes a `StoredTensor`, so that a rank reads the chunks that
overlap with its part. (torch's own `dcp.load(no_dist=True)` unpickles anything that the metadata
name, compares no checksums, and reads into tensors that exist already.)
"""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_shard.checkpoint.errors import (
    DCP_METADATA,
    DCP_PART,
    EARLIER,
    DamagedError,
    damage_named,
    inside,
)
from lightning_shard.checkpoint.stored import Region, StoredTensor
from lightning_shard.checkpoint.torch_file import read_torch_bytes
from lightning_shard.processes.narrow import is_dict

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


class Files:
    """Reads the files of a directory, and refuses one that was changed since it was written.

    Args:
        folder: The directory.
        compare: Called with the path of each file before its first byte is used; raises a
            DamagedError for a file that is not what was written.
    """

    def __init__(self, folder: Path, compare: Callable[[Path], None] = lambda path: None) -> None:
        self.folder, self._compare = folder, compare
        self._compared: set[Path] = set()
        self._identity = self._stat()

    def _stat(self) -> tuple[int, int]:
        found = self.folder.stat()
        return found.st_ino, found.st_mtime_ns

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Read bytes of a file.

        Raises:
            DamagedError: It is missing, too short, changed, or outside of the directory.
        """
        path = inside(self.folder, name)
        if not path.is_file():
            raise DamagedError(f"'{self.folder}' lacks '{name}'; {EARLIER}.")
        if path not in self._compared:
            self._compare(path)
            self._compared.add(path)
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(-1 if length is None else length)
        if self._stat() != self._identity:
            raise DamagedError(f"'{self.folder}' was replaced while it was read; read it again.")
        if length is not None and len(data) != length:
            raise DamagedError(f"'{path}' is cut off; {EARLIER}.")
        return data


def read_dcp(files: Files | Path) -> dict[str, Any]:
    """Read the nested dicts and lists that were saved, with `StoredTensor`s in place of tensors.

    Raises:
        DamagedError: The metadata are not whole, or hold anything but metadata.
    """
    files = files if isinstance(files, Files) else Files(files)
    what = f"'{files.folder / METADATA}'"
    with damage_named(what, DCP_METADATA):
        tree = _tree(files, _read_metadata(files))
        if not is_dict(tree):
            raise DamagedError(f"{what} holds a {type(tree).__name__}, and no weights by name.")
        return tree


def _tree(files: Files, metadata: Metadata) -> Any:
    stored: Mapping[Any, Any] = metadata.storage_data or {}
    paths: Mapping[str, Any] = metadata.planner_data or {}
    places = {(index.fqn, index.offset): place for index, place in stored.items()}
    tree: dict[Any, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        value: Any
        if isinstance(entry, TensorStorageMetadata):
            value = _stored(files, name, entry, places)
        else:
            value = _content(files, places[name, None])
        path: Sequence[Any] = paths.get(name, (name,))
        branch = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = value
    return _with_lists(tree)


def _read_metadata(files: Files) -> Metadata:
    path = files.folder / METADATA
    try:
        metadata = _MetadataUnpickler(io.BytesIO(files.read(METADATA))).load()
    except pickle.UnpicklingError as err:
        raise DamagedError(f"'{path}' is not whole, or {DCP_METADATA.not_one} ({err}).") from err
    if not isinstance(metadata, Metadata):
        raise DamagedError(f"'{path}' holds a {type(metadata).__name__}, {DCP_METADATA.not_one}.")
    return metadata


def _stored(
    files: Files, name: str, entry: TensorStorageMetadata, places: Mapping[Any, Any]
) -> StoredTensor:
    dtype, origin = entry.properties.dtype, f"'{files.folder}'"
    _refuse_other_chunks(entry, name, origin)

    def read(region: Region) -> Tensor:
        with damage_named(origin, DCP_PART):
            out = torch.empty([r.stop - r.start for r in region], dtype=dtype, device="cpu")
            found = sum(
                _copy_overlap(out, region, chunk, lambda c: _content(files, places[name, c]))
                for chunk in entry.chunks
            )
            if found != out.numel():
                raise DamagedError(f"{origin} lacks a part of '{name}'; {EARLIER}.")
            return out

    return StoredTensor(torch.Size(entry.size), dtype, read)


def _refuse_other_chunks(entry: TensorStorageMetadata, name: str, origin: str) -> None:
    """Refuse chunks of which one is there twice, or that are not all of the tensor."""
    once = len({chunk.offsets for chunk in entry.chunks}) == len(entry.chunks)
    held = sum(chunk.sizes.numel() for chunk in entry.chunks)
    if not once or held != entry.size.numel() or min(entry.size, default=0) < 0:
        raise DamagedError(f"{origin} lacks a part of '{name}', or has one twice; {EARLIER}.")


def _copy_overlap(
    out: Tensor, region: Region, chunk: Any, read: Callable[[torch.Size], Tensor]
) -> int:
    """Copy what a chunk holds of a region; how many numbers that were."""
    overlap = [
        slice(max(r.start, low), min(r.stop, low + n))
        for r, low, n in zip(region, chunk.offsets, chunk.sizes, strict=True)
    ]
    if any(part.start >= part.stop for part in overlap):
        return 0
    whole = read(chunk.offsets)
    if whole.shape != chunk.sizes or whole.dtype != out.dtype:
        raise DamagedError(f"a chunk has shape {tuple(whole.shape)}, not {tuple(chunk.sizes)}.")
    target = out[_shifted(overlap, [r.start for r in region])]
    target.copy_(whole[_shifted(overlap, chunk.offsets)])
    return target.numel()


def _shifted(region: list[slice], origin: Any) -> Region:
    return tuple(slice(r.start - low, r.stop - low) for r, low in zip(region, origin, strict=True))


def _content(files: Files, place: Any) -> Any:
    if getattr(place, "transform_descriptors", None):
        raise DamagedError(
            f"'{files.folder}' is compressed by an extension of torch.distributed.checkpoint; "
            "save it without."
        )
    data = files.read(place.relative_path, place.offset, place.length)
    return read_torch_bytes(data, str(files.folder / place.relative_path))


def _with_lists(tree: Any) -> Any:
    """Dicts whose keys are 0, 1, ... were lists, except optimizer states."""
    if not is_dict(tree):
        return tree
    items = {key: _below(key, value) for key, value in tree.items()}
    if items and items.keys() == {*range(len(items))}:
        return [items[i] for i in range(len(items))]  # ranks have written them in another order
    return items


def _below(key: Any, value: Any) -> Any:
    if key != "state" or not is_dict(value):
        return _with_lists(value)
    return {k: _with_lists(v) for k, v in value.items()}
