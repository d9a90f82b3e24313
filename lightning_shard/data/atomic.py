"""Writes and deletes files and directories so that what has its final name is whole.

What is being written, and what is being deleted, ends with `.partial`. The name says which process
writes it, so that two runs never write into one, and a later save finds what a killed one left.
"""

import contextlib
import errno
import io
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
_OF_DIRECTORIES = ("manifest.json", "meta.pt", ".metadata")  # a checkpoint has one of these
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
ABANDONED_S = 24 * 3600  # a partial one of another machine that nobody wrote to for so long
ATTEMPTS = 100  # another run may put its checkpoint in place at the same moment
_HOST = re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())[:40]
_WRITER = re.compile(r"\.([A-Za-z0-9_-]+)\.(\d+)\.[0-9a-f]{8}\.partial$")


def partial_of(path: Path) -> Path:
    """Return a path beside `path` that no other process, and no other call, uses."""
    writer = f"{_HOST}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    return path.with_name(f"{path.name}.{writer}{PARTIAL}")


def replaced_name(path: Path) -> Path:
    """Return the path of the old checkpoint while the new one is renamed; `last` finds it there."""
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


@contextlib.contextmanager
def written_file(path: Path) -> Generator[io.BufferedWriter]:
    """Open a file to write; it becomes `path` if nothing is raised, and is removed otherwise.

    Raises:
        OSError: It cannot be written; one sentence with the path and the cause.
    """
    partial = partial_of(path)
    with disk_errors(path):
        refuse_folder(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        try:
            with _synced_file(partial) as file:
                yield file
            put_in_place(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def refuse_folder(path: Path) -> None:
    """Refuse a folder in the place of a checkpoint, if it is none itself.

    Raises:
        IsADirectoryError: It holds files, which would be lost.
    """
    if not path.is_dir() or path.is_symlink() or any((path / n).exists() for n in _OF_DIRECTORIES):
        return
    if held := sorted(each.name for each in path.iterdir()):
        raise IsADirectoryError(
            f"'{path}' is a folder that holds {held[0]!r} and is no checkpoint, so it is not "
            f"replaced; name a file in it, such as '{path / 'last.ckpt'}'."
        )


@contextlib.contextmanager
def _synced_file(path: Path) -> Generator[io.BufferedWriter]:
    """Open a file that is on disk once it is closed."""
    file = path.open("wb")
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):  # closing flushes, which fails once more
            file.close()
        raise
    file.close()


@contextlib.contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """Turn an error of the disk into one sentence, also where torch's writer hides it.

    Raises:
        OSError: `path` cannot be written.
    """
    try:
        yield
    except Exception as err:
        cause = _last_os_error(err)
        if cause is None or cause.errno is None:
            raise
        name = errno.errorcode.get(cause.errno, str(cause.errno))
        reason = f"{os.strerror(cause.errno)} ({name})"
        raise OSError(cause.errno, f"'{path}' cannot be written: {reason}") from err


def of_the_disk(err: BaseException) -> bool:
    """Return whether an error is of a disk that is full, broken, or may not be written."""
    return isinstance(err, OSError) and err.errno in _OF_THE_DISK


def _last_os_error(err: BaseException | None) -> OSError | None:
    """Return `err` or the OSError that led to it; what led to that may have been served.

    So `mkdir(parents=True)` finds no parent, and then makes one, where it may.
    """
    seen: list[Any] = []
    while err is not None and err not in seen:
        if isinstance(err, OSError):
            return err
        seen.append(err)
        err = err.__cause__ or err.__context__
    return None


def put_in_place(partial: Path, path: Path) -> None:
    """Rename `partial` to `path`, which may exist, and which another run may replace too."""
    if not path.is_dir() and not partial.is_dir():
        partial.replace(path)
        return
    old = replaced_name(path)
    for attempt in range(ATTEMPTS):
        try:
            if path.exists() or path.is_symlink():  # otherwise the old one may be the only one
                remove(old)
                path.rename(old)
            partial.rename(path)
            break
        except OSError:
            if attempt == ATTEMPTS - 1 or not partial.exists():
                raise
    with contextlib.suppress(FileNotFoundError):  # the other run removed it
        remove(old)


def remove(path: Path) -> None:
    """Delete a file, a link or a directory; what is deleted in part has no final name."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.is_dir():
        shutil.rmtree(path if path.name.endswith(PARTIAL) else path.rename(partial_of(path)))


def remove_leftovers(folder: Path) -> None:
    """Delete what processes that were killed had begun to write or to delete in `folder`."""
    for path in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):  # another run removes it too, or owns it
            if _is_abandoned(path):
                remove(path)


def _is_abandoned(path: Path) -> bool:
    writer = _WRITER.search(path.name)
    if writer and writer[1] == _HOST:
        return not _is_alive(int(writer[2]))
    inner = path.iterdir() if path.is_dir() else ()
    last = max(p.stat().st_mtime for p in (path, *inner))
    return time.time() - last > ABANDONED_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the file is another user's
        pass
    return True
