"""Writes, deletes and compares files and directories: what has its final name is whole.

What is being written, and what is being deleted, ends with `.partial`. The name says which process
writes it, so that two runs never write into one, and a later save finds what a killed one left.
The manifest of a directory has size and SHA-256 of each of its files. What is not whole is named in
one sentence.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_shard.processes.narrow import is_dict

PARTIAL = ".partial"
ABANDONED_S = 24 * 3600  # a partial one of another machine that nobody wrote to for so long
ATTEMPTS = 100  # another run may put its checkpoint in place at the same moment
_HOST = re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())[:40]
_WRITER = re.compile(r"\.([A-Za-z0-9_-]+)\.(\d+)\.[0-9a-f]{8}\.partial$")
MANIFEST = "manifest.json"
FORMAT = "lightning_shard 1"
READ = (".metadata", ".distcp", "meta.pt")
REMEDY = "take an earlier checkpoint"
TRUST = "if you trust the file pass weights_only=False to trainer.fit (or validate, test, predict)"


class DamagedError(ValueError):
    """A file is not whole, is not what was written, or is of another kind."""


class UnsafeFileError(ValueError):
    """A file holds an object whose building could run code.

    Args:
        path: The file.
        found: The class of the object.
        remedy: What to do about it.
    """

    def __init__(self, path: str, found: str, remedy: str = TRUST) -> None:
        self.path, self.found = path, found
        super().__init__(
            f"'{path}' holds a {found} besides tensors and plain values, and building it could run "
            f"code: {remedy}, or allow the class by torch.serialization.add_safe_globals."
        )


@contextlib.contextmanager
def damage_named(what: str, *, kind: str, remedy: str) -> Generator[None]:
    """Turn what a parser raises about bytes that it does not expect into one sentence.

    Args:
        what: The file, in quotes.
        kind: What it should be, with its article.
        remedy: What to do.

    Raises:
        DamagedError: In place of any other error than a missing file.
    """
    try:
        yield
    except (DamagedError, UnsafeFileError, FileNotFoundError):
        raise
    except Exception as err:  # parsers of damaged bytes raise whatever they stumble over
        raise DamagedError(f"{what} is not whole, or {kind}; {remedy}.") from err


def inside(folder: Path, name: object) -> Path:
    """Find the file of `folder` that another of its files names.

    Raises:
        DamagedError: The name points outside of the folder.
    """
    parts = PurePosixPath(str(name)).parts
    if not isinstance(name, str | Path) or not parts or parts[0] == "/" or ".." in parts:
        raise DamagedError(f"'{folder}' names a file that points outside of it: '{name}'.")
    return folder / str(name)


def partial_of(path: Path) -> Path:
    """Make a name beside `path` that no other process, and no other call, uses."""
    writer = f"{_HOST}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    return path.with_name(f"{path.name}.{writer}{PARTIAL}")


def replaced_name(path: Path) -> Path:
    """Say where the old checkpoint waits while the new one is renamed; `last` finds it there."""
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


@contextlib.contextmanager
def written_file(path: Path) -> Generator[io.BufferedWriter]:
    """Open a file to write; it becomes `path` if nothing is raised, and is removed otherwise.

    Raises:
        OSError: It cannot be written; one sentence with the path and the cause.
    """
    partial = partial_of(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        try:
            with _file(partial) as file:
                yield file
            put_in_place(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _file(path: Path) -> Generator[io.BufferedWriter]:
    """A file that is on disk when it is closed."""
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
        cause = _of_the_disk(err)
        if cause is None or cause.errno is None:
            raise
        name = errno.errorcode.get(cause.errno, str(cause.errno))
        reason = f"{os.strerror(cause.errno)} ({name})"
        raise OSError(cause.errno, f"'{path}' cannot be written: {reason}") from err


def _of_the_disk(err: BaseException | None) -> OSError | None:
    """The first OSError in the chain that led to `err`."""
    found: OSError | None = None
    seen: list[Any] = []
    while err is not None and err not in seen:
        seen.append(err)
        found = err if isinstance(err, OSError) else found
        err = err.__cause__ or err.__context__
    return found


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
    except PermissionError:  # of another user
        pass
    return True


def described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest; None for a directory that another strategy wrote.

    Raises:
        DamagedError: It is not whole, or names files outside of the directory.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    with damage_named(f"'{path}'", kind=f"no manifest of {FORMAT}", remedy=REMEDY):
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}")
        for name, entry in manifest["files"].items():
            inside(folder, name)
            int(entry["bytes"])
        for key in ("mesh", "versions", "hyper_parameters"):
            if not is_dict(manifest.get(key, {})):
                raise ValueError(f"{key} of another kind")
        return manifest


def problem_of(folder: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """Say why the directory is not whole, or None; each of several ranks reads its share."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    for path in sorted(folder.iterdir()):  # others may lie there: nobody reads them
        if path.name.endswith(READ) and path.name not in manifest["files"]:
            return f"the manifest does not name '{path.name}'"
    problems = (
        problem_with(folder / name, entry, number % ranks == rank)
        for number, (name, entry) in enumerate(sorted(manifest["files"].items()))
    )
    return next(filter(None, problems), None)


def problem_with(path: Path, entry: Mapping[str, Any], with_hash: bool = True) -> str | None:
    """Say why a file is not the one that the manifest describes."""
    if not path.is_file():
        return f"'{path.name}' is missing"
    if path.stat().st_size != entry.get("bytes"):
        return f"'{path.name}' has {path.stat().st_size} bytes instead of {entry.get('bytes')}"
    if not entry.get("sha256"):
        return f"the manifest has no hash of '{path.name}'"
    if with_hash and described(path)["sha256"] != entry["sha256"]:
        return f"'{path.name}' is not what was written (its hash differs)"
    return None


def compared_with(folder: Path, manifest: Mapping[str, Any]) -> Callable[[Path], None]:
    """Give the function that compares a file of the directory with the manifest."""

    def compare(path: Path) -> None:
        name = path.relative_to(folder).as_posix()
        if problem := problem_with(path, manifest["files"].get(name, {"bytes": "no"})):
            raise DamagedError(f"'{folder}' is incomplete: {problem}; {REMEDY}.")

    return compare
