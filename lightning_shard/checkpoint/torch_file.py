"""Reads files of `torch.save`: runs nothing that is in them, and refuses what was changed since.

Such a file is a zip archive of stored records: one pickle, and the bytes of each tensor. The
archive holds a CRC-32 of each record, which torch itself does not compare. A flipped bit in a name
or an offset of the directory makes a record start elsewhere, so names are compared too.

A pickle may hold one list ten times, and that list another one ten times: after twenty levels a
kilobyte stands for more values than a machine has memory. It may also hold a list that contains
itself. Both are refused.
"""

import io
import mmap
import os
import re
import struct
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from zlib_ng import zlib_ng

from lightning_shard.checkpoint.errors import (
    TORCH_FILE,
    DamagedError,
    UnsafeFileError,
    damage_named,
)
from lightning_shard.processes.narrow import is_dict

THREADS = 8  # zlib-ng leaves the interpreter free while it sums, at about 9 GB/s each
_SIGNATURE = b"PK\x03\x04"
LEVELS = 200
REPEATED = 100  # times as many values as there are in the file; so much is never an accident
FEW = 2**20  # values that take no time
_CONTAINERS = (list, tuple, set, frozenset)
_NAME = 30  # where the name begins in the header of a record


def read_torch_file(
    path: str | Path, weights_only: bool = True, *, checked: bool = False, only: str = ""
) -> Any:
    """Read what `torch.save` wrote; its tensors are mapped, and not read before they are used.

    Args:
        path: A local file.
        weights_only: False lets the file run code; only for files that you trust.
        checked: True if `check_records` has compared the file already.
        only: The end of the names of the records to compare, if tensors will not be read.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedError: It is not whole, is not what was written, or is of another kind.
        UnsafeFileError: It needs `weights_only=False`.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file '{path}'.")
    if not checked:
        check_records(path, only=only)
    mapped = zipfile.is_zipfile(path)  # torch before 1.6 wrote no zip files, and no checksums
    return _load(path, str(path), weights_only, mmap=mapped)


def read_torch_bytes(data: bytes, origin: str) -> Any:
    """Read what `torch.save` wrote into a part of the file `origin`.

    Raises:
        DamagedError: It is not whole, is not what was written, or is of another kind.
        UnsafeFileError: It holds an object whose building could run code.
    """
    with damage_named(f"'{origin}'", TORCH_FILE):
        stream = io.BytesIO(data)
        if not zipfile.is_zipfile(stream):
            raise ValueError("no zip archive")
        _compare(stream, memoryview(data), origin, slice(None))
    return _load(io.BytesIO(data), origin, True, mmap=False)


def check_records(path: Path, rank: int = 0, ranks: int = 1, *, only: str = "") -> None:
    """Compare the records of a file with their checksums; each of several ranks takes its share.

    Raises:
        DamagedError: A record is not what was written.
    """
    with damage_named(f"'{path}'", TORCH_FILE), path.open("rb") as file:
        if not zipfile.is_zipfile(file) or os.fstat(file.fileno()).st_size == 0:
            return
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with mapped, memoryview(mapped) as data:
            _compare(file, data, str(path), slice(rank, None, ranks), only)


def _compare(file: IO[bytes], data: memoryview, origin: str, share: slice, only: str = "") -> None:
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    if len({record.filename for record in records}) < len(records):
        raise _changed(origin, "its list of records")
    bodies = [_body(data, record, origin) for record in records]
    if not any(record.CRC for record in records):
        return  # torch.serialization.set_crc32_options(False): no checksums were written
    pairs = [pair for pair in zip(records, bodies, strict=True) if pair[0].filename.endswith(only)]
    _sum(pairs[share], data, origin)


def _sum(pairs: Sequence[tuple[zipfile.ZipInfo, slice]], data: memoryview, origin: str) -> None:
    def is_right(pair: tuple[zipfile.ZipInfo, slice]) -> bool:
        with data[pair[1]] as body:
            return zlib_ng.crc32(body) == pair[0].CRC

    large = sum(record.file_size for record, _ in pairs) > 2**20
    if large:
        with ThreadPoolExecutor(THREADS) as executor:
            right = list(executor.map(is_right, pairs))
    else:
        right = list(map(is_right, pairs))
    for (record, _), same in zip(pairs, right, strict=True):
        if not same:
            raise _changed(origin, f"record '{record.filename}'")


def _body(data: memoryview, record: zipfile.ZipInfo, origin: str) -> slice:
    """Find the bytes of a record by the header in front of them, as torch does."""
    start = record.header_offset + _NAME
    name, extra = struct.unpack_from("<HH", data, start - 4)
    stored = record.compress_type == zipfile.ZIP_STORED
    begin = start + name + extra
    whole = 0 <= begin <= begin + record.file_size <= len(data)
    signed = bytes(data[record.header_offset :][:4]) == _SIGNATURE
    own = signed and bytes(data[start : start + name]) == record.orig_filename.encode()
    if not (stored and whole and own and record.compress_size == record.file_size):
        raise _changed(origin, f"the header of record '{record.filename}'")
    return slice(begin, begin + record.file_size)


def _changed(origin: str, what: str) -> DamagedError:
    return DamagedError(
        f"'{origin}' is not whole: {what} is not what was written (its checksum differs); "
        f"{TORCH_FILE.remedy}."
    )


def _load(source: Path | IO[bytes], origin: str, weights_only: bool, **options: Any) -> Any:
    try:
        with damage_named(f"'{origin}'", TORCH_FILE):
            loaded = torch.load(source, map_location="cpu", weights_only=weights_only, **options)
            refuse_repetition(loaded, origin)
            return loaded
    except DamagedError as err:
        if found := re.search(r"(?:GLOBAL|class) ([\w.]+) ", str(err.__cause__)):
            raise UnsafeFileError(origin, found[1]) from err.__cause__
        raise


def refuse_repetition(value: Any, origin: str) -> None:
    """Look through nested containers, each of them once.

    Args:
        value: The content that was read.
        origin: The file, for the message.

    Raises:
        DamagedError: It has too many levels, or more values than it could mean to hold.
    """
    sizes: dict[int, int] = {}  # values in a container, counted as often as they are repeated
    single = 0  # values in the file

    def size(value: Any, level: int) -> int:
        nonlocal single
        if is_dict(value):
            inner = [*value.keys(), *value.values()]
        elif isinstance(value, _CONTAINERS):
            inner = value
        else:
            return 1
        if id(value) not in sizes:
            if level > LEVELS:
                raise DamagedError(f"'{origin}' holds values of more than {LEVELS} levels.")
            single += len(inner)
            sizes[id(value)] = 1 + sum([size(v, level + 1) for v in inner])
        return sizes[id(value)]

    repeated = size(value, 0)
    if repeated > max(FEW, REPEATED * single):
        raise DamagedError(
            f"'{origin}' repeats its {single:,} values so often that they are {repeated:.0e}; no "
            "checkpoint does."
        )
