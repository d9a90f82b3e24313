"""Says what is wrong with a checkpoint, in one sentence that names the file."""

import contextlib
from collections.abc import Generator
from pathlib import Path, PurePosixPath

REMEDY = "if you trust the file pass weights_only=False to trainer.fit (or validate, test, predict)"


class DamagedError(ValueError):
    """A file is not whole, is not what was written, or is of another kind."""


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
