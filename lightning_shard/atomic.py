"""Files and directories that have their name when they are whole, and lose it before they are not.

What is being written, and what is being deleted, ends with `.partial`.
"""

import shutil
from pathlib import Path

PARTIAL = ".partial"


def partial_of(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


def replaced_name(path: Path) -> Path:
    """Where the old checkpoint waits while the new one is renamed; `last` finds it there too."""
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


def put_in_place(partial: Path, path: Path) -> None:
    """Rename `partial` to `path`, which may exist."""
    if not path.is_dir() and not partial.is_dir():
        partial.replace(path)
        return
    old = replaced_name(path)
    if path.exists() or path.is_symlink():  # otherwise the old one may be the only one
        remove(old)
        path.rename(old)
    partial.rename(path)
    remove(old)


def remove(path: Path) -> None:
    """Delete a file, a link or a directory; what is deleted in part has no final name."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        if not path.name.endswith(PARTIAL):
            aside = path.with_name(f"{path.name}.removed{PARTIAL}")
            remove(aside)
            path = path.rename(aside)
        shutil.rmtree(path)
