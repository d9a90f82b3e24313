"""Imports the packages of file formats, which the plain install of lightning-shard lacks."""

import importlib
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def optional(package: str, needed_by: str, extra: str) -> Any:
    """Import a package of a file format.

    Args:
        package: The name of the module to import.
        needed_by: The thing that cannot work without it; it begins the sentence.
        extra: The extra of lightning-shard that installs it.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as err:
        missing = (err.name or "").partition(".")[0]
        raise ModuleNotFoundError(
            f"{needed_by} needs the package '{missing}', which is not installed; "
            f"pip install 'lightning-shard[{extra}]' installs it.",
            name=err.name,
        ) from err


@contextmanager
def damaged(what: str, then: str = ".") -> Generator[None]:
    """Turn what the package of a format raises into one sentence: each codec has its own errors.

    Args:
        what: The begin of the sentence, with the name of the file.
        then: Its end, after what the package says.

    Raises:
        ValueError: Something was raised.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{what} ({error}){then}") from error


def mark_of(path: Path) -> tuple[str, int]:
    """Return what tells a file from others, alike for copies of it on several machines."""
    held = [path, path / "zarr.json", path / ".zgroup"]  # the size of a folder says nothing
    return path.name, next((each.stat().st_size for each in held if each.is_file()), 0)


@dataclass
class OpenFile:
    """An open file, one for each process, since no process may use that of another.

    Attributes:
        open: Opens the file; it travels to worker processes.
    """

    open: Callable[[], Any]
    _opened: tuple[int, Any] = field(default=(0, None), repr=False, compare=False)

    def __call__(self) -> Any:
        """Return the file, opened when this process asks for the first time."""
        if self._opened[0] != os.getpid():
            self._opened = os.getpid(), self.open()
        return self._opened[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"open": self.open, "_opened": (0, None)}
