"""Gives samples of fields on disk, of which each rank reads only the part that it needs.

Shapes: S samples of C channels.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_shard.data.readers.field_file import FieldFile
from lightning_shard.data.slab import slab_of


class FieldDataset(Dataset[dict[str, Any]]):
    """Samples `{key: field}`, read from disk one by one: of each field this rank's part alone.

    Under `HybridShardStrategy` its mesh and `shard_dims` say what the part is; anywhere else it is
    the whole field. The file is opened in each worker process when it reads its first sample.

    Args:
        path: An HDF5 file (.h5, .hdf5) or a Zarr group (.zarr).
        entries: Keys of a sample, and the array of each: `(S, C, *spatial)`, or (S, H, W) for
            fields of one channel.
        trainer: The Trainer that will use the samples, or the domain mesh of a loop of your own;
            None for whole fields.
        samples: The numbers of the samples in the file, by default all.
        group: The group of the file that holds the arrays, if they are not at its root.
        dtype: The dtype to which fields are converted.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file cannot be read, lacks an array, or has fewer samples.
    """

    def __init__(
        self,
        path: str | Path,
        entries: Sequence[str] | Mapping[str, str] = ("x", "y"),
        trainer: Any = None,
        samples: range | None = None,
        group: str = "",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.file, self.dtype = FieldFile(path, group), dtype
        names = entries if isinstance(entries, Mapping) else {name: name for name in entries}
        self.arrays = dict(names)
        shapes = self.file.shapes(tuple(self.arrays.values()))
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

    def __len__(self) -> int:
        return len(self.samples)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {
            key: slab.entry(partial(self.file.read, self.arrays[key], sample), sample, self.dtype)
            for key, slab in self.slabs.items()
        }
