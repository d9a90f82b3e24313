"""Errors about files, each of one sentence: a file is not whole, or could run code."""

import contextlib
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lightning_shard.processes.errors import LightningShardError

EARLIER = "take an earlier checkpoint"
AGAIN = "copy it again"
TRUST = "if you trust the file pass weights_only=False to trainer.fit (or validate, test, predict)"


class Kind(NamedTuple):
    """A kind of file, in words of the sentence that refuses a file of another one.

    Attributes:
        not_one: The words for a file that is not of this kind, such as "no safetensors file".
        remedy: The words for what a user can do about it.
    """

    not_one: str
    remedy: str


TORCH_FILE = Kind("no file of torch.save", f"{AGAIN}, or {EARLIER}")
SAFETENSORS_FILE = Kind("no safetensors file", AGAIN)
SAFETENSORS_INDEX = Kind("no index of safetensors files", AGAIN)
DCP_METADATA = Kind("no metadata of torch.distributed.checkpoint", EARLIER)
DCP_PART = Kind("not of one run", EARLIER)


class DamagedError(LightningShardError, ValueError):
    """A file is not whole, is not what was written, or is of another kind."""


class UnsafeFileError(LightningShardError, ValueError):
    """A file holds an object whose building could run code.

    Args:
        path: The file.
        found: The class of the object.
        remedy: The advice of the message.
    """

    def __init__(self, path: str, found: str, remedy: str = TRUST) -> None:
        self.path, self.found = path, found
        super().__init__(
            f"'{path}' holds a {found} besides tensors and plain values, and building it could run "
            f"code: {remedy}, or allow the class by torch.serialization.add_safe_globals."
        )


@contextlib.contextmanager
def damage_named(what: str, kind: Kind) -> Generator[None]:
    """Turn what a parser raises about bytes that it does not expect into one sentence.

    Args:
        what: The file, in quotes.
        kind: The kind that it should be of.

    Raises:
        DamagedError: The bytes are not those of the kind; any error but that of a missing file
            becomes it.
    """
    try:
        yield
    except (DamagedError, UnsafeFileError, FileNotFoundError):
        raise
    except Exception as err:  # parsers of damaged bytes raise whatever they stumble over
        raise DamagedError(f"{what} is not whole, or {kind.not_one}; {kind.remedy}.") from err


def inside(folder: Path, name: object) -> Path:
    """Find the file of `folder` that another of its files names.

    Raises:
        DamagedError: The name points outside of the folder.
    """
    parts = PurePosixPath(str(name)).parts
    if not isinstance(name, str | Path) or not parts or parts[0] == "/" or ".." in parts:
        raise DamagedError(f"'{folder}' names a file that points outside of it: '{name}'.")
    return folder / str(name)
