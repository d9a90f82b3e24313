"""Writes and reads safetensors files with checksums, one tensor at a time.

The format has no checksum, so ours stand in its free metadata: under `crc32` a CRC-32 of each
tensor's name, dtype, shape and bytes. Files of others have none and are read without. The format
has no complex128 either: such a tensor is stored as pairs of float64 and its name under `complex`.

Source: https://github.com/huggingface/safetensors (format).
"""

import json
import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from torch import Tensor
from zlib_ng import zlib_ng

from lightning_shard.checkpoint.errors import (
    AGAIN,
    SAFETENSORS_FILE,
    SAFETENSORS_INDEX,
    DamagedError,
    damage_named,
    inside,
)
from lightning_shard.checkpoint.stored import Region, StoredTensor

INDEX_SUFFIX = ".safetensors.index.json"
SAFETENSORS = (".safetensors", INDEX_SUFFIX)  # the ends of the names
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

FEW_BYTES = 2**20  # rows are read whole up to this size, though a region holds a part of them


def in_order(names: Iterable[str], dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Order the tensors of a file: the widest numbers come first, so that each is aligned."""
    return sorted(names, key=lambda name: -_as_stored(dtypes[name]).itemsize)


def write_safetensors(
    file: IO[bytes],
    shapes: Mapping[str, torch.Size],
    dtypes: Mapping[str, torch.dtype],
    tensors: Iterable[Tensor],
) -> None:
    """Write tensors one after the other, so that no more than one of them need be in memory.

    Args:
        file: Opened for writing at its beginning.
        shapes: The shape of each tensor, by name.
        dtypes: The dtype of each tensor, by name.
        tensors: On the CPU, as `in_order` sorts their names.

    Raises:
        ValueError: The format does not have such numbers.
    """
    pairs = [name for name in shapes if dtypes[name] == torch.complex128]
    header: dict[str, Any] = {}
    end = 0
    for name in in_order(shapes, dtypes):
        dtype = _as_stored(dtypes[name])
        if dtype not in DTYPES:
            raise ValueError(f"safetensors files hold no {dtype}, as '{name}' is; write .pt.")
        shape = [*shapes[name], 2] if name in pairs else [*shapes[name]]
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    sums = dict.fromkeys(header, 0)
    _write_header(file, header, sums, pairs)
    for (name, entry), tensor in zip(header.items(), tensors, strict=True):
        values = tensor.detach().resolve_conj().resolve_neg()
        values = torch.view_as_real(values) if name in pairs else values
        data = values.contiguous().flatten().view(torch.uint8).numpy().data
        sums[name] = zlib_ng.crc32(data, _described(name, entry, pairs))
        file.write(data)
    file.seek(0)
    _write_header(file, header, sums, pairs)


def _as_stored(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.complex128 else dtype


def _write_header(
    file: IO[bytes], header: Mapping[str, Any], sums: Mapping[str, int], pairs: list[str]
) -> None:
    texts = {name: f"{value:08x}" for name, value in sums.items()}
    about = {"format": "pt", "complex": json.dumps(pairs), "crc32": json.dumps(texts)}
    text = json.dumps({"__metadata__": about, **header}).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _described(name: str, entry: Mapping[str, Any], pairs: list[str]) -> int:
    text = json.dumps([name, entry["dtype"], entry["shape"], name in pairs])
    return zlib_ng.crc32(text.encode())


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Give the tensors of a file, or of those that an index names; each is read when it is used.

    A tensor that has a checksum is compared with it before its first part is read.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedError: It is not whole, or of another kind.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file '{path}'.")
    if not path.name.endswith(INDEX_SUFFIX):
        with damage_named(f"'{path}'", SAFETENSORS_FILE):
            return _OneFile(path).tensors()
    with damage_named(f"'{path}'", SAFETENSORS_INDEX):
        places: dict[str, str] = json.loads(path.read_text())["weight_map"]
        parts = {name: inside(path.parent, name) for name in {*places.values()}}
        for name, part in parts.items():
            if not part.is_file():
                raise DamagedError(f"'{path}' names '{name}', which is missing; {AGAIN}.")
        files = {name: read_safetensors(part) for name, part in parts.items()}
        missing = [name for name, file in places.items() if name not in files[file]]
        if missing:
            raise DamagedError(f"'{path}' names '{missing[0]}', which its file has not.")
    return {name: files[file][name] for name, file in places.items()}


class _OneFile:
    """A file, its header, and which of its tensors have been compared with their checksums."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = safe_open(path, framework="pt")
        about: Mapping[str, str] = self.file.metadata() or {}
        self.pairs: list[str] = json.loads(about.get("complex", "[]"))
        self.sums: dict[str, str] | None = json.loads(about.get("crc32", "null"))
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            self.header = json.loads(raw.read(length))
            self.data = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        self.begin = 8 + length

    def tensors(self) -> dict[str, StoredTensor]:
        names: list[str] = list(self.file.keys())
        pairs = [self.header[name]["shape"][-1:] == [2] for name in self.pairs if name in names]
        named = self.sums is None or {*names} == {*self.sums}
        if len(pairs) != len(self.pairs) or not all(pairs) or not named:
            raise DamagedError(f"'{self.path}' is not whole: its header was changed; {AGAIN}.")
        return {name: self._tensor(name) for name in names}

    def _tensor(self, name: str) -> StoredTensor:
        part: Any = self.file.get_slice(name)
        shape = torch.Size(part.get_shape())
        empty: Tensor = part[(slice(0, 0),) * len(shape)] if shape else self.file.get_tensor(name)
        dtype = empty.dtype
        compared = self._comparison(name)

        def read(region: Region) -> Tensor:
            compared()
            with damage_named(f"'{self.path}'", SAFETENSORS_FILE):
                rows = self._rows(name, dtype, region) if shape.numel() else None
                if rows is not None:
                    return rows
                return part[region] if shape else self.file.get_tensor(name)

        if name not in self.pairs:
            return StoredTensor(shape, dtype, read)

        def read_pairs(region: Region) -> Tensor:
            return torch.view_as_complex(read((*region, slice(0, 2))))

        return StoredTensor(shape[:-1], dtype.to_complex(), read_pairs)

    def _rows(self, name: str, dtype: torch.dtype, region: Region) -> Tensor | None:
        """Read the rows of a region into memory of their own; None if that reads much besides.

        Where a file is mapped, the system maps pages around those that are read as well.
        """
        entry = self.header[name]
        shape: list[int] = entry["shape"]
        if not shape:
            return None
        first, *others = (part.indices(n) for part, n in zip(region, shape, strict=True))
        begin, end = entry["data_offsets"]
        count, row = max(0, first[1] - first[0]), (end - begin) // shape[0]
        whole = [(0, n, 1) for n in shape[1:]] == others
        if first[2] != 1 or not (whole or count * row <= FEW_BYTES):
            return None
        data = torch.empty(count * row, dtype=torch.uint8, device="cpu")
        with self.path.open("rb", buffering=0) as raw:
            raw.seek(self.begin + begin + first[0] * row)
            if raw.readinto(data.numpy().data) != count * row:
                raise DamagedError(f"'{self.path}' is not whole: it ends early; {AGAIN}.")
        return data.view(dtype).view(count, *shape[1:])[(slice(None), *region[1:])]

    def _comparison(self, name: str) -> Callable[[], None]:
        """Compares the tensor with its checksum, once."""
        left = iter([name] if self.sums is not None else [])

        def compare() -> None:
            for _ in left:
                entry = self.header[name]
                begin, end = (self.begin + offset for offset in entry["data_offsets"])
                with memoryview(self.data) as data, data[begin:end] as body:
                    found = zlib_ng.crc32(body, _described(name, entry, self.pairs))
                if f"{found:08x}" != (self.sums or {})[name]:
                    raise DamagedError(
                        f"'{self.path}' is not whole: '{name}' is not what was written (its "
                        f"checksum differs); {AGAIN}."
                    )

        return compare


def compare_all(tensors: Mapping[str, StoredTensor]) -> None:
    """Compare each tensor with its checksum, by reading an empty part of it.

    Raises:
        DamagedError: One is not what was written.
    """
    for tensor in tensors.values():
        tensor.read(tuple(slice(0, 0) for _ in tensor.shape))
