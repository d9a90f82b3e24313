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
from lightning_shard.data.readers.opened import mark_of
from lightning_shard.data.slab import slab_of
from lightning_shard.processes.arguments import is_whole, names_of


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
        TypeError: `entries` has no names, `samples` no whole numbers, or `dtype` is none.
        ValueError: The file cannot be read, lacks an array, or has fewer samples; or its arrays
            have several numbers of samples.
    """

    def __init__(
        self,
        path: str | Path,
        entries: Sequence[str] | Mapping[str, str] = ("x", "y"),
        trainer: Any = None,
        samples: Sequence[int] | None = None,
        group: str = "",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.file, self.dtype = FieldFile(path, group), dtype
        self.arrays = (
            dict(entries)
            if isinstance(entries, Mapping)
            else {name: name for name in names_of(entries, "entries")}
        )
        if not self.arrays:
            raise ValueError("entries must name one array or more; got none.")
        shapes = self.file.shapes(tuple(self.arrays.values()))
        counts = {array: count for array, (count, _) in shapes.items()}
        stored = min(counts.values())
        if samples is None and len({*counts.values()}) > 1:
            found = ", ".join(f"{count} of {array}" for array, count in counts.items())
            raise ValueError(
                f"{path} holds {found}, so some samples lack an entry, or the entries of a sample "
                f"have several numbers; write the file anew, or give samples=range({stored}) if "
                "the first ones belong together."
            )
        self.samples = range(stored) if samples is None else _numbers(samples)
        outside = [n for n in self.samples if not 0 <= n < stored]
        if outside:
            raise ValueError(
                f"{path} holds {stored} samples, but sample {outside[-1]} is asked for; "
                f"ask for those from 0 to {stored - 1}."
            )
        self._mark = mark_of(Path(path))
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
            key: slab.entry(
                partial(self.file.read, self.arrays[key], sample), (sample, self._mark), self.dtype
            )
            for key, slab in self.slabs.items()
        }


def _numbers(samples: Any) -> Sequence[int]:
    """Return the numbers of samples, also of an array or a tensor."""
    numbers = samples.tolist() if hasattr(samples, "tolist") else samples
    is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str)
    if not is_list or not all(is_whole(n, least=None) for n in numbers):
        raise TypeError(
            f"samples must be the numbers of samples, such as range(100); got {samples!r}. Those "
            "of a mask are mask.nonzero()[0]."
        )
    return numbers if isinstance(numbers, range) else [*map(int, numbers)]
