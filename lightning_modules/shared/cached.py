"""Values that are made once and kept in files, which are whole or not there.

Compressed JSON and torch's files have checksums, which tell whether they are what was written.
"""

import contextlib
import gzip
import hashlib
import json
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn


def cached(path: Path, make: Callable[[], Any]) -> Any:
    """Read the value in `path`, which is made and written first where no intact file is.

    Args:
        path: A file named `*.json.gz`; its name is to hold a digest of what determines the value.
        make: Makes the value, of types that JSON can hold.

    Returns:
        The value, as read from JSON.

    Raises:
        OSError: The file could not be written; nothing is left of it.
    """
    if path.exists():
        try:
            return json.loads(gzip.decompress(path.read_bytes()))
        except (EOFError, OSError, ValueError, zlib.error):
            rank_zero_warn(f"{path} is damaged; making it again.")
    value = make()
    # without a time stamp, so that the same value makes the same file
    write_whole(path, gzip.compress(json.dumps(value).encode(), mtime=0))
    return value


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that has its name once it is whole.

    Args:
        path: The file; its folder is made if missing.
        content: The bytes that it is to hold.

    Raises:
        OSError: It could not be written; nothing is left of it, and an older file stays.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as err:
        raise OSError(
            f"{path} could not be written ({err.strerror or err}); it needs {len(content)} bytes "
            "in a folder that may be written to: make room, or name another folder."
        ) from err
    finally:
        with contextlib.suppress(OSError):  # it may be its folder that could not be made
            partial.unlink()


def is_intact(path: Path) -> bool:
    """Return True if a file of `torch.save`, a zip archive, fits its checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError):
        return False


def digest(parts: Iterable[str]) -> str:
    """Hash texts in their order, to name a file after what determines its content."""
    state = hashlib.sha256()
    for part in parts:
        state.update(f"{len(part)}:{part}".encode())
    return state.hexdigest()[:12]
