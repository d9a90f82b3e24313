"""Reads volumes in NIfTI files and pictures in TIFF files, of which each rank reads its part alone.

Shapes: C channels, X x Y x Z voxels, in the order of the file.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_shard.data.readers.opened import optional
from lightning_shard.data.readers.pictures import ImageFile
from lightning_shard.data.slab import slab_of

PICTURES = (".tif", ".tiff")
SUFFIXES = (".nii", ".nii.gz", ".img", ".hdr", *PICTURES)


class VolumeFile:
    """A NIfTI file, of which a part is read.

    A compressed file (.nii.gz) is decompressed up to the end of the part; an uncompressed one is
    read at the part alone. The orientation is that of the file.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no NIfTI file, or has another number of dims than 3 or 4.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        nibabel = optional("nibabel", f"the file {path}", "nifti")
        if not self.path.exists():
            raise FileNotFoundError(f"the volume {path} does not exist; check its name.")
        try:
            self._image = nibabel.load(path)
        except (nibabel.filebasedimages.ImageFileError, OSError, EOFError, ValueError) as error:
            raise ValueError(f"{path} is not a whole NIfTI file ({error}).") from error
        stored = tuple(int(n) for n in self._image.shape)
        if len(stored) not in (3, 4):
            raise ValueError(f"{path} must have 3 dims, or 4 with channels; got {stored}.")
        self.shape = (*stored[3:], *stored[:3]) if len(stored) == 4 else (1, *stored)
        self.affine = np.asarray(self._image.affine)

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Read the part at an index (C, X, Y, Z), such as `slab.index`, scaled as the file says.

        Raises:
            ValueError: The file is damaged, or holds no numbers.
        """
        places = (*index[1:], index[0])[: len(self._image.shape)]
        try:
            values = np.asanyarray(self._image.dataobj[places])
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"{self.path} is damaged ({error}); restore it.") from error
        if values.dtype.kind not in "biufc":
            raise ValueError(
                f"{self.path} holds colors of {values.dtype}, which are no numbers; write them as "
                "channels, in its fourth dim."
            )
        values = np.moveaxis(values, 3, 0) if values.ndim == 4 else values[None]
        return values.astype(values.dtype.newbyteorder("="))


class VolumeDataset(Dataset[dict[str, Any]]):
    """Samples `{key: (C, X, Y, Z)}` of NIfTI files: of each volume this rank's part alone.

    Files of TIFF are read in the same way, as (C, H, W) or (C, Z, H, W); see `ImageFile`. A NIfTI
    file of three dims is one channel; the fourth dim holds channels. Values are scaled as the
    file says. The orientation is that of the file. All files of a sample have one grid; the grids
    of two samples may differ, with one sample in a batch. A compressed file (.nii.gz) is
    decompressed up to the end of the part; an uncompressed one is read at the part alone.

    Args:
        files: The files of each key of a sample, one for each sample, or a folder of them:
            `{"image": "imagesTr", "label": "labelsTr"}`. Files are matched by their order, which is
            that of their names in a folder.
        trainer: The Trainer that will use the samples, or the domain mesh of a loop of your own;
            None for whole volumes.
        labels: Keys whose values are whole numbers. They are split as the other volumes of the
            sample are, of which there must be one; alone they stay whole, unless `shard_dims` of
            the strategy names them.
        dtype: The dtype to which other values are converted.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file is no NIfTI file, or the files of a sample do not fit together.
    """

    def __init__(
        self,
        files: Mapping[str, str | Path | Sequence[str | Path]],
        trainer: Any = None,
        labels: Sequence[str] = ("label",),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.files = {key: _files(where) for key, where in files.items()}
        self.dtypes = {key: torch.int64 if key in labels else dtype for key in files}
        counts = {key: len(found) for key, found in self.files.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"each key needs as many files as the others; got {counts}.")
        # by default only floating point is split; labels go with it
        split = dict.fromkeys(files, dtype) if {*files} - {*labels} else self.dtypes
        self.slabs: list[dict[str, Any]] = []
        for sample in zip(*self.files.values(), strict=True):
            shapes = [_opened(path).shape for path in sample]
            if len({shape[1:] for shape in shapes}) > 1:
                raise ValueError(
                    f"the volumes of a sample must have one grid; got "
                    f"{' and '.join(f'{p} {s[1:]}' for p, s in zip(sample, shapes, strict=True))}."
                )
            self.slabs.append(
                {
                    key: slab_of(trainer, key, shape, split[key])
                    for key, shape in zip(self.files, shapes, strict=True)
                }
            )

    def __len__(self) -> int:
        return len(self.slabs)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            key: slab.entry(partial(self._read, key, index), index, self.dtypes[key])
            for key, slab in self.slabs[index].items()
        }

    def affine_of(self, sample: int) -> np.ndarray | None:
        """Return the place of a sample's voxels in the patient, which predictions share."""
        file = _opened(next(iter(self.files.values()))[sample])
        return file.affine if isinstance(file, VolumeFile) else None

    def _read(self, key: str, index: int, part: Sequence[slice]) -> np.ndarray:
        path, dtype = self.files[key][index], self.dtypes[key]
        values = _opened(path).read(part)
        is_whole = np.array_equal(values, np.rint(values)) and np.isfinite(values).all()
        if dtype == torch.int64 and not is_whole:
            raise ValueError(
                f"{path} must hold whole numbers, as a file of labels; got {values.dtype}."
            )
        return values


def _opened(path: Path) -> VolumeFile | ImageFile:
    return ImageFile(path) if path.name.lower().endswith(PICTURES) else VolumeFile(path)


def _files(where: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return files in the order given, or those of a folder in the order of their names.

    Raises:
        FileNotFoundError: There are none.
    """
    if not isinstance(where, (str, Path)):
        return [Path(path) for path in where]
    folder = Path(where)
    if not folder.is_dir():
        return [folder]
    found = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIXES))
    if not found:
        raise FileNotFoundError(
            f"the folder {folder} has no file that ends in {', '.join(SUFFIXES)}; name another."
        )
    return found
