"""Writes and reads Lightning's files without second copies: a `CheckpointIO` of our own.

A file appears whole or not at all: it is written beside its place under another name and renamed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from lightning_shard.checkpoint.prepared import save_whole
from lightning_shard.checkpoint.safetensors_file import SAFETENSORS, read_safetensors
from lightning_shard.checkpoint.stored import bytes_of
from lightning_shard.checkpoint.torch_file import check_records, read_torch_file
from lightning_shard.data.atomic import remove, written_file
from lightning_shard.lightning import CheckpointIO, TorchCheckpointIO, WrappingCheckpointIO
from lightning_shard.processes.errors_together import together

SHARDED_ABOVE_BYTES = 16 * 2**30  # a single file takes as much CPU memory on rank 0
Format = Literal["auto", "single", "sharded", "async"]  # "async": a directory, in background


def is_local(path: str | Path) -> bool:
    """Say whether `path` is on a mounted file system, not behind a URL."""
    return isinstance(url_to_fs(str(path))[0], LocalFileSystem)


def local_path(path: str | Path) -> Path:
    """Read the path of a file on a mounted file system, which may be a `file://` URL."""
    return Path(url_to_fs(str(path))[1])


class CheckpointFiles(TorchCheckpointIO):
    """Streams Lightning's files to disk, and maps them into memory; leaves URLs to Lightning."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a file; on failure what was there before stays."""
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = local_path(path)
        with written_file(path) as file:
            save_whole(checkpoint, file)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a file; code in it runs only if `weights_only` is False."""
        weights_only = weights_only is not False
        if not is_local(path):
            return super().load_checkpoint(path, map_location, weights_only)
        path = local_path(path)
        if path.name.endswith(SAFETENSORS):
            return {"state_dict": {name: v.whole() for name, v in read_safetensors(path).items()}}
        if not dist.is_initialized():
            return read_torch_file(path, weights_only)
        together(lambda: check_records(path, dist.get_rank(), dist.get_world_size()))
        return read_torch_file(path, weights_only, checked=True)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a file or a directory."""
        if is_local(path):
            remove(local_path(path))
        else:
            super().remove_checkpoint(path)


def refuse_other_formats(chosen: str) -> None:
    """Refuse a format that there is not.

    Raises:
        ValueError: It is none of `Format`.
    """
    if chosen not in ("auto", "single", "sharded", "async"):
        raise ValueError(
            f"checkpoint_format must be 'auto', 'single', 'sharded' or 'async'; got {chosen!r}."
        )


def is_directory(
    chosen: Format, checkpoint: dict[str, Any], path: str | Path, io: CheckpointIO, *, options: Any
) -> bool:
    """Say whether a checkpoint becomes a directory.

    Args:
        chosen: The format; "auto": by size.
        checkpoint: The content, whose size decides for "auto".
        path: The name of the checkpoint.
        io: The plug-in that would write a file.
        options: Lightning's `storage_options`, which only a file has.

    Raises:
        ValueError: The format is a directory, and the path on no mounted file system.
    """
    able = is_local(path) and options is None
    directory = chosen in ("sharded", "async")
    if directory and not able:
        raise ValueError(
            f"checkpoint_format {chosen!r} needs a directory on a mounted file system and no "
            f"storage_options; got '{path}', {options}. Use checkpoint_format 'single'."
        )
    if chosen != "auto":
        return directory
    large = bytes_of(checkpoint) > SHARDED_ABOVE_BYTES
    return able and type(io) is CheckpointFiles and large


def complete_io(io: CheckpointIO | None) -> CheckpointIO:
    """Choose what writes and reads files: `io`, with this package's files where it has none."""
    if io is None:
        return CheckpointFiles()
    if isinstance(io, WrappingCheckpointIO) and io.checkpoint_io is None:
        io.checkpoint_io = CheckpointFiles()
    return io
