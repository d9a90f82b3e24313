"""Reads volumes in NIfTI files and pictures in TIFF files, of which each rank reads its part alone.

Shapes: C channels, X x Y x Z voxels, in the order of the file.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_shard.data.readers.opened import damaged, mark_of, optional
from lightning_shard.data.readers.pictures import ImageFile
from lightning_shard.data.slab import slab_of
from lightning_shard.processes.arguments import names_of

_VOXELS = 0.5  # by which the files of a sample may lie apart
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
        self.path = Path(path).absolute()
        nibabel = optional("nibabel", f"the file {path}", "nifti")
        if not self.path.exists():
            raise FileNotFoundError(f"the volume {path} does not exist; check its name.")
        with damaged(f"{path} is not a whole NIfTI file"):
            self._image = nibabel.load(self.path)
        stored = tuple(int(n) for n in self._image.shape)
        if len(stored) not in (3, 4):
            raise ValueError(f"{path} must have 3 dims, or 4 with channels; got {stored}.")
        self.shape = (*stored[3:], *stored[:3]) if len(stored) == 4 else (1, *stored)
        self.affine = np.asarray(self._image.affine)
        self.orientation = nibabel.aff2axcodes(self.affine)

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Read the part at an index (C, X, Y, Z), such as `slab.index`, scaled as the file says.

        Raises:
            ValueError: The file is damaged, or holds no numbers.
        """
        places = (*index[1:], index[0])[: len(self._image.shape)]
        sizes = [part.stop - part.start for part in places]
        with damaged(f"{self.path} is damaged", "; restore it."):
            values = (
                np.asanyarray(self._image.dataobj[places])
                if all(sizes)  # else nibabel may seek before the begin of the file
                else np.empty(sizes, self._image.get_data_dtype())
            )
        if values.dtype.kind not in "biufc":
            raise ValueError(
                f"{self.path} holds colors of {values.dtype}, which are no numbers; write them as "
                "channels, in its fourth dim."
            )
        values = np.moveaxis(values, 3, 0) if values.ndim == 4 else values[None][index[0]]
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
            `{"image": "imagesTr", "label": "labelsTr"}`. Files are matched by their order. In a
            folder that is the order of the words and numbers in their names, so `case_2` comes
            before `case_10`. Folders whose names, or the numbers in them, are those of other
            cases are refused.
        trainer: The Trainer that will use the samples, or the domain mesh of a loop of your own;
            None for whole volumes.
        labels: Keys whose values are whole numbers. They are split as the other volumes of the
            sample are, of which there must be one; alone they stay whole, unless `shard_dims` of
            the strategy names them.
        dtype: The dtype to which other values are converted.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: `files` is no mapping, `labels` has no names, or `dtype` is none of torch's.
        ValueError: A file is no NIfTI file, a folder lacks a file of a sample, or the files of a
            sample do not fit together.
    """

    def __init__(
        self,
        files: Mapping[str, str | Path | Sequence[str | Path]],
        trainer: Any = None,
        labels: Sequence[str] = ("label",),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not isinstance(files, Mapping) or not files:
            raise TypeError(
                "files must map each key of a sample to its files, such as "
                f"{{'image': 'imagesTr'}}; got {files!r}."
            )
        labels = names_of(labels, "labels")
        if unknown := [key for key in labels if key not in files and key != "label"]:
            raise ValueError(f"labels names {unknown[0]!r}, but files has {[*files]}; use these.")
        self.files = {key: _files(where) for key, where in files.items()}
        self.dtypes = {key: torch.int64 if key in labels else dtype for key in files}
        self._marks = {key: [mark_of(path) for path in found] for key, found in self.files.items()}
        counts = {key: len(found) for key, found in self.files.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"each key needs as many files as the others; got {counts}.")
        _same_cases({key: files[key] for key in files if _is_folder(files[key])}, self.files)
        # by default only floating point is split; labels go with it
        split = dict.fromkeys(files, dtype) if {*files} - {*labels} else self.dtypes
        self.slabs: list[dict[str, Any]] = []
        apart: list[Path] = []
        for sample in zip(*self.files.values(), strict=True):
            opened = [_opened(path) for path in sample]
            shapes = [file.shape for file in opened]
            if len({shape[1:] for shape in shapes}) > 1:
                raise ValueError(
                    f"the volumes of a sample must have one grid; got "
                    f"{' and '.join(f'{p} {s[1:]}' for p, s in zip(sample, shapes, strict=True))}."
                )
            volumes = [file for file in opened if isinstance(file, VolumeFile)]
            _same_orientation(volumes)
            apart += [v.path for v in volumes if _distance(v, volumes[0]) > _VOXELS][:1]
            self.slabs.append(
                {
                    key: slab_of(trainer, key, shape, split[key])
                    for key, shape in zip(self.files, shapes, strict=True)
                }
            )

        if apart:
            warnings.warn(
                f"In {len(apart)} of {len(self)} samples voxels of one index lie at different "
                f"places in the patient, by the affines of the files (first: {apart[0]}). Compare "
                "the files of these samples.",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self.slabs)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            key: slab.entry(
                partial(self._read, key, index),
                (index, self._marks[key][index]),
                self.dtypes[key],
            )
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


def _same_orientation(volumes: Sequence[VolumeFile]) -> None:
    """Compare the directions of the axes of a sample's volumes.

    Raises:
        ValueError: They differ, so that voxels of one index lie at different places.
    """
    found = {"".join(map(str, v.orientation)): v.path for v in volumes}
    if len(found) > 1:
        raise ValueError(
            f"the volumes of a sample must have one orientation; got "
            f"{' and '.join(f'{path} {axes}' for axes, path in found.items())}. Write them anew by "
            "nibabel.as_closest_canonical."
        )


def _distance(volume: VolumeFile, other: VolumeFile) -> float:
    """Return how far voxels of one index are from each other, at most, in voxels."""
    corners = np.array([*product(*((0, n - 1) for n in volume.shape[1:]), [1])]).T
    apart = np.abs((volume.affine - other.affine) @ corners).max()
    return float(apart / np.linalg.norm(other.affine[:3, :3], axis=0).min())


def _same_cases(folders: Mapping[str, Any], files: Mapping[str, Sequence[Path]]) -> None:
    """Compare the cases of folders that name some cases alike, as nnU-Net's do.

    Names that have no other name in common are compared by their numbers: `img_3` and `seg_3`.

    Raises:
        ValueError: One of them has a case that another one lacks, or has it at another place.
    """
    for one, other in combinations(folders, 2):
        pairs = [*zip(files[one], files[other], strict=True)]
        for cases_of in (_names, _numbers):
            cases = cases_of(files[one]), cases_of(files[other])
            if {*cases[0]} & {*cases[1]}:
                for (path, beside), case, another in zip(pairs, *cases, strict=True):
                    if case != another:
                        raise ValueError(
                            f"the cases of {folders[one]} are not those of {folders[other]}: "
                            f"{path.name} would be matched with {beside.name}; add what is "
                            f"missing, or give {one!r} and {other!r} as lists of files."
                        )
                break


def _names(paths: Sequence[Path]) -> list[Any]:
    """Return the names without their ends, and without nnU-Net's number of the only channel."""
    stems = [path.name.removesuffix(_end(path)) for path in paths]
    channel = "_0000" if all(stem.endswith("_0000") for stem in stems) else ""
    return [stem.removesuffix(channel) for stem in stems]


def _numbers(paths: Sequence[Path]) -> list[Any]:
    """Return the numbers in the names, or a name that has none."""
    return [tuple(map(int, re.findall("[0-9]+", name))) or name for name in _names(paths)]


def _order(path: Path) -> tuple[list[tuple[bool, int, str]], str]:
    """Return the words and numbers of a name.

    Cases have the same order by them whatever follows: `liver_2_0000.nii.gz` comes before
    `liver_10_0000.nii.gz`, as `liver_2.nii.gz` before `liver_10.nii.gz`.
    """
    words = re.findall(r"[0-9]+|[^\W\d_]+", path.name.removesuffix(_end(path)))
    return [(not w.isdecimal(), int(w) if w.isdecimal() else 0, w) for w in words], path.name


def _end(path: Path) -> str:
    end = next((end for end in SUFFIXES if path.name.lower().endswith(end)), "")
    return path.name[len(path.name) - len(end) :]


def _is_folder(where: str | Path | Sequence[str | Path]) -> bool:
    return isinstance(where, (str, Path)) and Path(where).is_dir()


def _files(where: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return files in the order given, or those of a folder in the order of its cases.

    Raises:
        FileNotFoundError: There are none.
    """
    if not isinstance(where, (str, Path)):
        return [Path(path).absolute() for path in where]  # a later os.chdir changes nothing
    folder = Path(where).absolute()
    if not folder.is_dir():
        return [folder]
    names = {path.name for path in folder.iterdir() if _end(path) and path.name[0] != "."}
    # a pair of .hdr and .img is one volume
    found = [folder / n for n in names if not (n.endswith(".hdr") and f"{n[:-4]}.img" in names)]
    if not found:
        raise FileNotFoundError(
            f"the folder {folder} has no file that ends in {', '.join(SUFFIXES)}; name another."
        )
    return sorted(found, key=_order)
