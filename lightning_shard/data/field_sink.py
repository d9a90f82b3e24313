"""Writes fields into files, a part of a sample at a time, in any order.

What is written has its name once it is whole; until then the name ends in `.partial`, and says
which process writes it.

Shapes: S samples of C channels.
"""

import math
import os
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_shard.data.atomic import (
    disk_errors,
    partial_of,
    put_in_place,
    remove,
    remove_leftovers,
)
from lightning_shard.data.failing_later import FailingLater
from lightning_shard.data.readers.opened import optional
from lightning_shard.data.sample_files import WRITERS

MOST_BYTES = 2**24  # a block of more is cut: it is compressed and checked as one
ARRAYS = (".zarr", ".h5", ".hdf5")


@dataclass(frozen=True)
class Field:
    """Describes the samples of one name.

    Attributes:
        count: The number S of samples.
        shape: The shape of a sample, such as (C, H, W).
        dtype: The dtype.
    """

    count: int
    shape: tuple[int, ...]
    dtype: np.dtype


class FieldSink:
    """A file or a folder of fields, to write.

    Args:
        path: `*.zarr` and `*.h5` hold arrays (S, C, *spatial) by name. `*.nii`, `*.nii.gz` and
            `*.tif` hold one field: of several samples each has a number in its file's name. A name
            without such an end is a folder of `.pt` files, one for each sample.
        overwrite: True to replace what is there; otherwise an existing file is an error.
        affine: A function that gives the affine matrix for a NIfTI file, of a name and the number
            of a sample; None where it is not known.

    Raises:
        FileExistsError: The file is there, and `overwrite` is false; or a folder holds other files.
        ModuleNotFoundError: The package of the format is not installed.
        NotADirectoryError: A folder of the path is a file.
        ValueError: The end of the name is not known.
    """

    def __init__(
        self,
        path: str | Path,
        overwrite: bool = False,
        affine: Callable[[str, int], np.ndarray | None] | None = None,
    ) -> None:
        self.path, self.overwrite = Path(path), overwrite
        self.affine = affine or (lambda name, sample: None)
        self.end = end_of(self.path)
        for package, extra in _NEEDS.get(self.end, ()):
            optional(package, f"the file {self.path}", extra)
        if above := next((each for each in self.path.parents if each.is_file()), None):
            raise NotADirectoryError(
                f"{self.path} cannot be written, because {above} is a file; choose another path."
            )
        if not overwrite and (there := self._there()):
            raise FileExistsError(
                f"{there[0]} is there already; choose another path, or remove it (in a program, "
                "PredictionWriter(..., overwrite=True) replaces it)."
            )
        if not self.end and self.path.is_dir():
            _refuse_other_files(self.path)
        self.partial = partial_of(self.path)
        self.fields: dict[str, Field] = {}  # as they were added last
        self.several = set[str]()  # names whose samples have several shapes or dtypes
        self._root: Any = None
        self._file: FailingLater | None = None  # that of HDF5
        self._raw: dict[str, tuple[int, np.ndarray]] = {}
        self._others: dict[int, dict[str, Any]] = {}

    def begin(self) -> None:
        """Remove what an earlier run has left, and make the place of what is not whole yet."""
        with disk_errors(self.path):
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.partial.parent)
            if self.end == ".zarr":
                zarr = optional("zarr", str(self.path), "zarr")
                self._root = zarr.open_group(self.partial, mode="w")
            elif self.end in ARRAYS:
                self._file = FailingLater(self.partial, "w+")
                self._root = optional("h5py", str(self.path), "hdf5").File(self._file, "w")
            else:
                self.partial.mkdir()

    def add(self, name: str, field: Field, block: Sequence[int] | None = None) -> None:
        """Make an array, unless it is there.

        Args:
            name: Its name.
            field: The description of its samples.
            block: The extents of the parts of a sample that will be written; the file holds blocks
                of these, or smaller ones.

        Raises:
            ValueError: The format holds no such fields.
        """
        if self._root is None and not self.partial.exists():
            self.begin()
        if self.fields.get(name) == field:
            return
        if check := WRITERS.get(self.end):
            check.refuse(self.path, name, field.shape, field.dtype)
        if self.end in ARRAYS:
            if name in self.fields:
                refuse_another(self.path, name, self.fields[name], field)
            self._make_array(name, field, block or field.shape)
        elif name in self.fields:
            self.several.add(name)
        elif self.end:
            self._refuse_same_file(name)
        self.fields[name] = field

    def _refuse_same_file(self, name: str) -> None:
        for other in self.fields:
            if other.replace("/", "_") == name.replace("/", "_"):
                raise ValueError(
                    f"{other!r} and {name!r} would be written into one file beside {self.path}; "
                    "give one of them another key."
                )

    def _make_array(self, name: str, field: Field, block: Sequence[int]) -> None:
        """Make an array, of which NaN are the rows of samples that are never written."""
        options = {
            "name": name, "shape": (field.count, *field.shape), "dtype": field.dtype,
            "chunks": (1, *_block(field, block)),
        }  # fmt: skip
        unset = field.dtype.type(np.nan if field.dtype.kind in "fc" else 0)
        with self._writing():
            if self.end == ".zarr":
                self._root.create_array(**options, fill_value=unset)
            else:
                self._root.create_dataset(**options, fillvalue=unset)

    @contextmanager
    def _writing(self) -> Generator[None]:
        """Turn an error of the disk into one sentence."""
        with disk_errors(self.path):
            yield
            if self._file is not None:
                self._file.check()

    def write(self, name: str, sample: int, index: Sequence[slice], values: np.ndarray) -> None:
        """Write the part of a sample that lies at `index`.

        Raises:
            OSError: It cannot be written, for example on a full disk.
        """
        with self._writing():
            if self._root is not None:
                if values.size:
                    self._root[name][(sample, *index)] = values
            elif self.fields[name].shape:
                self._open(name, sample)[tuple(index)] = values
            else:
                self._open(name, sample)[...] = values

    def keep(self, name: str, sample: int, value: Any) -> None:
        """Keep something of a sample that is no array; only a folder holds it.

        Raises:
            ValueError: The path is no folder.
        """
        if self.end:
            raise ValueError(
                f"{self.path} holds arrays alone, but {name!r} of a sample is of type "
                f"{type(value).__name__}; write into a folder, whose name has no such end, or "
                "leave it out."
            )
        self._others.setdefault(sample, {})[name] = value

    def abandon(self) -> None:
        """Remove what was written; the file of its name stays as it is."""
        with suppress(OSError):  # the disk is full, perhaps
            self._close_root()
        self._raw.clear()
        remove(self.partial)

    def _close_root(self) -> None:
        root, file = self._root, self._file
        self._root = self._file = None
        if file is not None:
            with file:
                root.close()
                file.check()

    def close(self) -> list[Path]:
        """Give the file its name, and return it, or the files of all samples.

        Raises:
            OSError: It cannot be written, for example on a full disk.
        """
        with disk_errors(self.path):
            return self._close()

    def _close(self) -> list[Path]:
        if not (self.fields or self._others):
            self._close_root()
            remove(self.partial)
            return []
        if self._root is not None:
            self._close_root()
            put_in_place(self.partial, self.path)
            return [self.path]
        if self.overwrite:
            names = (re.escape(name.replace("/", "_")) for name in self.fields)
            for there in self._there("|".join(names)):
                remove(there)
        self._raw.clear()
        if self.end:
            return self._write_samples()
        self._write_folder()
        return [self.path]

    def _open(self, name: str, sample: int) -> np.ndarray:
        """Return the values of a sample, which lie in a raw file until all are written."""
        if self._raw.get(name, (-1,))[0] != sample:
            path, field = self._place(name, sample), self.fields[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            made = (
                np.load(path, mmap_mode=None if 0 in self.fields[name].shape else "r+")
                if path.exists()
                else _new_array(path, field.shape, field.dtype)
            )
            self._raw[name] = sample, made
        return self._raw[name][1]

    def _place(self, name: str, sample: int) -> Path:
        return self.partial / "raw" / name / f"{sample:06d}.npy"

    def _write_samples(self) -> list[Path]:
        """Write a file of each sample and name that has values."""
        found = [
            (name, sample)
            for name, field in self.fields.items()
            for sample in range(field.count)
            if self._place(name, sample).exists()
        ]
        made: list[Path] = []
        for name, sample in found:
            words = [self.path.name.removesuffix(self.end)]
            words += [name.replace("/", "_")] * (len(self.fields) > 1)
            words += [f"{sample:06d}"] * (self.fields[name].count > 1)
            path = self.path.with_name("_".join(words) + self.end)
            place = self._place(name, sample)
            values = np.load(place, mmap_mode="r")
            written = self.partial / path.name
            WRITERS[self.end].write(written, values, self.affine(name, sample))
            place.unlink()
            made.append(path)
        for path in made:
            (self.partial / path.name).rename(path)
        remove(self.partial)
        return made

    def _write_folder(self) -> None:
        """Write a file of torch for each sample: a tensor, or a dict of several things."""
        samples = {*self._others, *(n for f in self.fields.values() for n in range(f.count))}
        for sample in sorted(samples):
            held = self._others.get(sample, {})
            places = {name: self._place(name, sample) for name in self.fields}
            for name, place in places.items():
                if place.exists():
                    held[name] = torch.from_numpy(np.load(place))
            if held:
                alone = held["prediction"] if [*held] == ["prediction"] else held
                # torch does not say why it cannot write into a path
                with (self.partial / f"{sample:06d}.pt").open("wb") as file:
                    torch.save(alone, file)
            for place in places.values():
                place.unlink(missing_ok=True)
        remove(self.partial / "raw")
        put_in_place(self.partial, self.path)

    def _there(self, names: str = ".*") -> list[Path]:
        """Return the files that are there with the names of samples of some fields.

        Args:
            names: A pattern of the fields' names; by default of all that there may be.
        """
        found = [self.path] if self.path.exists() else []
        if self.end and self.end not in ARRAYS and self.path.parent.is_dir():
            stem = self.path.name.removesuffix(self.end)
            numbered = re.compile(rf"{re.escape(stem)}_(({names})_)?\d{{6}}{re.escape(self.end)}")
            found += sorted(p for p in self.path.parent.iterdir() if numbered.fullmatch(p.name))
        return found


def refuse_another(path: Path, name: str, held: Field, field: Field) -> None:
    """Refuse samples of another shape or dtype than those of an array.

    Raises:
        ValueError: They differ.
    """
    if held != field:
        raise ValueError(
            f"{path} holds the samples of {name!r} in one array, but one has the shape "
            f"{held.shape} and {held.dtype}, and another {field.shape} and {field.dtype}; make "
            "them alike, or write into a folder, which has a file for each sample."
        )


_NEEDS = {
    ".zarr": (("zarr", "zarr"),),
    ".h5": (("h5py", "hdf5"),),
    ".hdf5": (("h5py", "hdf5"),),
    **dict.fromkeys((".nii.gz", ".nii"), (("nibabel", "nifti"),)),
    **dict.fromkeys((".tif", ".tiff"), (("tifffile", "tiff"),)),
}
ENDS = tuple(_NEEDS)


def end_of(path: Path) -> str:
    """Return the end of a name, which says the format; none for a folder.

    Raises:
        ValueError: It is not known.
    """
    found = next((end for end in ENDS if path.name.lower().endswith(end)), "")
    if not found and path.suffix and not path.is_dir():
        raise ValueError(
            f"the format of {path} is not known; end its name in {', '.join(ENDS)}, or give the "
            "name of a folder, without a dot."
        )
    return found


def _block(field: Field, block: Sequence[int]) -> tuple[int, ...]:
    """Return the extents of a block that is not too large; no two parts that are written share one.

    So only dims that each part has whole are cut.
    """
    found = [max(1, min(n, extent)) for n, extent in zip(block, field.shape, strict=True)]
    for dim in reversed(range(len(found))):
        total = math.prod(found) * field.dtype.itemsize
        if total > MOST_BYTES and block[dim] >= field.shape[dim]:
            found[dim] = max(1, found[dim] * MOST_BYTES // total)
    return tuple(found)


def _refuse_other_files(folder: Path) -> None:
    """Refuse to replace a folder that holds more than predictions."""
    others = [p.name for p in sorted(folder.iterdir()) if not re.fullmatch(r"\d{6,}\.pt", p.name)]
    if others:
        raise FileExistsError(
            f"the folder {folder} holds {others[0]!r}, which is no prediction and would be lost; "
            f"choose another folder, such as {folder / 'predictions'}."
        )


def _new_array(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Map a new file into memory, once the disk has given all of its bytes.

    What is written into a mapped file on a full disk ends the process by a signal.
    """
    if 0 in shape:  # nothing can be mapped
        np.save(path, empty := np.empty(shape, dtype))
        return empty
    made = np.lib.format.open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return made
