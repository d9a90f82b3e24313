"""Stands in a batch for fields that lie in files, of which each tile reads its own rows.

Shapes: B samples of C channels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_shard.data.not_yet import NotYetATensor
from lightning_shard.processes.torch_private.internals import collate_functions
from lightning_shard.tensor.local_mesh import LocalMesh

Read = Callable[[Sequence[slice]], np.ndarray]


def as_tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return what a file holds as a tensor, to be converted to `dtype`.

    Raises:
        ValueError: It is complex, and the dtype is not.
    """
    if values.dtype.kind == "c" and not dtype.is_complex:
        raise ValueError(
            f"the file holds complex numbers, of which {dtype} keeps no imaginary part; write both "
            "parts as channels, or give the network complex parameters and the dataset their dtype."
        )
    if values.dtype == np.longdouble:  # torch has no such numbers
        values = values.astype(np.float64)
    return torch.from_numpy(values)


def as_array(x: Any) -> np.ndarray:
    """Copy a tensor into an array, bfloat16 as float32, since numpy has no bfloat16."""
    if not isinstance(x, Tensor):
        return np.asarray(x)
    dtype = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    # a copy, since what tiles hold goes on to move
    return x.detach().to("cpu", dtype, copy=True).resolve_conj().resolve_neg().numpy()


class FileField(NotYetATensor):
    """A field (B, C, *spatial) in files.

    Attributes:
        reads: A function for each sample, which reads a part of it.
        shape: The shape of the whole field.
        dtype: The dtype to which what is read is converted.
        affine: The place of voxels in the patient, of a volume.

    Args:
        reads: A function for each sample, which reads a part (C, *spatial) of it.
        shape: The shape of a sample.
        dtype: The dtype to which what is read is converted.
        device: The device to which rows are moved.
        affine: The place of voxels in the patient, of a volume.
    """

    def __init__(
        self,
        reads: Sequence[Read],
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        affine: np.ndarray | None = None,
    ) -> None:
        self.affine = affine
        self.reads, self.shape, self.dtype = tuple(reads), (len(reads), *shape), dtype
        self._device = device or torch.device("cpu")

    def to(self, device: torch.device, dtype: torch.dtype) -> "FileField":
        """Return the field as one of this device and dtype."""
        return FileField(self.reads, self.shape[1:], dtype, device)

    def pin_memory(self) -> "FileField":
        """Return itself, as a DataLoader asks for it: nothing is in memory."""
        return self

    def read(self, index: Sequence[slice]) -> Tensor:
        """Return the rows at an index (B, C, *spatial).

        Raises:
            ValueError: They are complex, and the dtype is not.
        """
        found = [as_tensor(read(index[1:]), self.dtype) for read in self.reads[index[0]]]
        made = torch.stack(found) if len(found) > 1 else found[0][None]
        return made.to(self._device, self.dtype, copy=True)  # numpy's memory goes at once

    @property
    def tensor(self) -> Tensor:
        """The whole field, which is read."""
        return self.read([slice(0, n) for n in self.shape])

    def split(self, mesh: LocalMesh, dims: int | Sequence[int]) -> Tensor:
        """Return the field in tiles, each of which reads its rows."""
        return mesh.cut_by(self.shape, dims, self.read)

    def without_values(self) -> Tensor:
        """Return a tensor of this shape that takes no memory, for a rehearsal."""
        return torch.zeros((), dtype=self.dtype, device="cpu").expand(self.shape)

    @staticmethod
    def collate(
        fields: Sequence["FileField"],
        *,
        collate_fn_map: dict[Any, Callable[..., Any]] | None = None,
    ) -> "FileField":
        """Put samples together, as `default_collate` does.

        Raises:
            ValueError: They have several shapes.
        """
        shapes = sorted({field.shape[1:] for field in fields})
        if len(shapes) > 1:
            raise ValueError(
                f"the fields of a batch must have one shape; got {shapes[0]} and {shapes[1]}. Use "
                "batch_size 1, or a dataloader for each shape."
            )
        reads = [read for field in fields for read in field.reads]
        return FileField(reads, shapes[0], fields[0].dtype)


def fields_of(source: Any, dtype: torch.dtype) -> list[FileField]:
    """Return the samples of a file, or of several, each as a batch of one.

    Args:
        source: A file with `shape` and `read`, such as `VolumeFile` and `ImageFile`; a `FieldFile`;
            or a list of these.
        dtype: The dtype to which what is read is converted.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(source, list | tuple):
        return [field for each in source for field in fields_of(each, dtype)]
    if hasattr(source, "samples"):
        return [FileField([read], shape, dtype) for read, shape in source.samples()]
    if not hasattr(source, "read") or not hasattr(source, "shape"):
        raise TypeError(
            f"source must be a FieldFile, VolumeFile or ImageFile, or a list of them; got "
            f"{type(source).__name__}."
        )
    affine = getattr(source, "affine", None)
    return [FileField([source.read], source.shape, dtype, affine=affine)]


collate_functions()[FileField] = FileField.collate
