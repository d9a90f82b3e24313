"""Writes one field of a sample into a file of medicine (NIfTI) or of pictures (TIFF).

Shapes: C channels, X x Y x Z voxels, H x W pixels.
"""

import gzip
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lightning_shard.data.readers.opened import optional

TILE = 512  # pixels of the edge of a tile of TIFF
_AXES = {2: "YX", 3: "CYX", 4: "CZYX"}
_STORED = {"float16": "float32", "bool": "uint8"}  # NIfTI and TIFF have no such numbers


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype that a file can hold."""
    return np.dtype(_STORED.get(dtype.name, dtype))


class SampleWriter(ABC):
    """Writes one field into one file.

    Attributes:
        dims: The numbers of dims of a field that the format holds.
    """

    dims: tuple[int, ...]

    def refuse(self, path: Path, name: str, shape: Sequence[int], dtype: np.dtype) -> None:
        """Refuse what the format does not hold.

        Raises:
            ValueError: The field has another number of dims, or complex numbers.
        """
        if len(shape) not in self.dims or dtype.kind == "c":
            raise ValueError(
                f"{path} holds fields of {' or '.join(map(str, self.dims))} dims of real numbers, "
                f"but a sample of {name!r} has the shape {tuple(shape)} and {dtype}; write .zarr "
                "or .h5."
            )

    @abstractmethod
    def write(self, path: Path, values: np.ndarray, affine: np.ndarray | None) -> None:
        """Write a field, a part of it at a time.

        Args:
            path: A new file.
            values: The field, which may be mapped from a file.
            affine: The place of voxels in the patient, for formats that hold it.
        """


class _Nifti(SampleWriter):
    """Writes volumes (X, Y, Z) or (C, X, Y, Z), whose channels are the fourth dim of the file."""

    dims = (3, 4)

    def write(self, path: Path, values: np.ndarray, affine: np.ndarray | None) -> None:
        nibabel = optional("nibabel", f"the file {path}", "nifti")
        volumes = values if values.ndim == 4 else values[None]
        shape = volumes.shape[1:] if len(volumes) == 1 else (*volumes.shape[1:], len(volumes))
        header = nibabel.Nifti1Header() if max(shape) < 2**15 else nibabel.Nifti2Header()
        dtype = stored_dtype(values.dtype)
        header.set_data_shape(shape)
        header.set_data_dtype(dtype)
        header.set_sform(np.eye(4) if affine is None else affine, code="aligned")
        header.set_slope_inter(1, 0)
        header["magic"] = header.single_magic
        start = -(-(header.sizeof_hdr + 4) // 16) * 16  # without extensions
        header["vox_offset"] = start
        opened = gzip.open if path.name.endswith(".gz") else open
        with opened(path, "wb") as file:
            file.write(header.binaryblock.ljust(start, b"\0"))
            for volume in volumes:
                for plane in range(shape[2]):  # the first dim is the fastest in the file
                    file.write(np.asarray(volume[:, :, plane], dtype).tobytes(order="F"))


class _Tiff(SampleWriter):
    """Writes pictures (H, W), (C, H, W) or (C, Z, H, W), a page for each plane, in tiles."""

    dims = (2, 3, 4)

    def write(self, path: Path, values: np.ndarray, affine: np.ndarray | None) -> None:
        tifffile = optional("tifffile", f"the file {path}", "tiff")
        dtype = stored_dtype(values.dtype)
        large = values.nbytes > 2**31  # beyond 4 GiB the classic format has no addresses
        tifffile.imwrite(
            path, _tiles(values, dtype), shape=values.shape, dtype=dtype, tile=(TILE, TILE),
            compression="zlib", photometric="minisblack", planarconfig=None, bigtiff=large,
            metadata={"axes": _AXES[values.ndim]},
        )  # fmt: skip


def _tiles(values: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the tiles of all planes, those of an edge filled with zeros."""
    height, width = values.shape[-2:]
    for plane in np.ndindex(values.shape[:-2]):
        for top in range(0, height, TILE):
            for left in range(0, width, TILE):
                part = values[plane][top : top + TILE, left : left + TILE]
                tile = np.zeros((TILE, TILE), dtype)
                tile[: part.shape[0], : part.shape[1]] = part
                yield tile


_NIFTI, _TIFF = _Nifti(), _Tiff()
WRITERS: dict[str, SampleWriter] = {
    ".nii": _NIFTI, ".nii.gz": _NIFTI, ".tif": _TIFF, ".tiff": _TIFF
}  # fmt: skip
