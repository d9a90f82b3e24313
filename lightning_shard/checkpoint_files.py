"""Lightning's file format, written and read without second copies: an own `CheckpointIO`.

A file appears whole or not at all: it is written beside its place under another name and renamed.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_shard.weight_files import read_torch_file, stored_weights

PARTIAL = ".partial"  # the end of the names of what is not whole yet, or no longer


def is_local(path: str | Path) -> bool:
    """Whether `path` is on a mounted file system, not behind a URL."""
    return isinstance(url_to_fs(str(path))[0], LocalFileSystem)


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's files, streamed to disk and mapped into memory; URLs as Lightning does it."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a file; on failure what was there before stays."""
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(url_to_fs(str(path))[1])
        partial = path.with_name(path.name + PARTIAL)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

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
        path = Path(url_to_fs(str(path))[1])
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            return {"state_dict": {name: v.whole() for name, v in stored_weights(path).items()}}
        return read_torch_file(path, weights_only)
