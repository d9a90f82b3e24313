"""Samples of fields on disk, of which each rank reads only the part that it needs.

Shapes: S samples of C channels.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_modules.shared.field_files import field_shapes, open_fields, read
from lightning_shard import slab_of


class FieldDataset(Dataset[dict[str, Any]]):
    """Samples `{key: field}`, read from disk one by one: of each field this rank's part alone.

    Under `HybridShardStrategy` its mesh and `shard_dims` say what the part is; anywhere else it is
    the whole field. The file is opened in each worker process when it reads its first sample.

    Args:
        path: An HDF5 file (.h5, .hdf5) or a Zarr group (.zarr).
        entries: Keys of a sample, and the array of each: (S, C, *spatial), or (S, H, W) for fields
            of one channel.
        trainer: The trainer that will use the samples; None for whole fields.
        samples: Which samples of the file, by default all.
        group: Where in the file the arrays are, if not at its root.
        dtype: What fields are converted to.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file cannot be read, lacks an array, or has fewer samples.
    """

    def __init__(
        self,
        path: str | Path,
        entries: Sequence[str] | Mapping[str, str] = ("x", "y"),
        trainer: Trainer | None = None,
        samples: range | None = None,
        group: str = "",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.path, self.group, self.dtype = Path(path), group, dtype
        names = entries if isinstance(entries, Mapping) else {name: name for name in entries}
        self.arrays = dict(names)
        shapes = field_shapes(self.path, tuple(self.arrays.values()), group)
        stored = min(count for count, _ in shapes.values())
        self.samples = range(stored) if samples is None else samples
        if self.samples and max(self.samples) >= stored:
            raise ValueError(
                f"{path} holds {stored} samples, but sample {max(self.samples)} is asked for; "
                "ask for fewer."
            )
        self.slabs = {
            key: slab_of(trainer, key, shapes[array][1], dtype)
            for key, array in self.arrays.items()
        }
        self._opened: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        arrays, sample = self._arrays(), self.samples[index]
        entries: dict[str, Any] = {}
        for key, slab in self.slabs.items():
            array = arrays[self.arrays[key]]
            stored = slab.index[len(slab.index) + 1 - array.ndim :]  # without a channel dim of one
            rows = torch.from_numpy(read(array, self.path, (sample, *stored))).to(self.dtype)
            extents = [part.stop - part.start for part in slab.index]
            entries[key] = slab.part(rows.reshape(extents), sample)
        return entries

    def _arrays(self) -> Any:
        """The open file; one for each process, since no process may use that of another."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), open_fields(self.path, self.group))
        return self._opened[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}
