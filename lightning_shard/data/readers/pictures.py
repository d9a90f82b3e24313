"""Reads TIFF files, also OME-TIFF and cloud-optimized GeoTIFF: of each page its needed tiles alone.

Shapes: C channels, H x W pixels; Z planes of a stack.
"""

import functools
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_shard.data.readers.opened import OpenFile, damaged, optional

_SPATIAL = "ZYX"


class ImageFile:
    """A TIFF file, of which a part is read: (C, H, W), or (C, Z, H, W) of a stack.

    Samples of a pixel, pages and time steps are channels. Only the tiles or strips are decoded that
    the part needs, so a large picture should be stored in tiles. Each process opens the file when
    it reads first.

    Args:
        path: The file.
        level: The level of a pyramid: 0 for the full resolution.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no TIFF file, or lacks the level.

    Example:
        >>> slide = ImageFile("slide.ome.tif")
        >>> slide.shape  # (3, 98304, 61440)
        >>> rows = slide.read((slice(0, 3), slice(0, 512), slice(0, 61440)))
    """

    def __init__(self, path: str | Path, level: int = 0) -> None:
        self.path = Path(path).absolute()  # a later os.chdir changes nothing
        self._open = OpenFile(functools.partial(_open, self.path, level))
        opened = self._open()
        extents = dict(zip(opened.axes, map(int, opened.array.shape), strict=True))
        if not {"Y", "X"} <= {*extents}:
            raise ValueError(f"{path} must have dims Y and X; got {opened.axes}.")
        channels = math.prod(n for axis, n in extents.items() if axis not in _SPATIAL)
        self.shape = (channels, *(extents[axis] for axis in _SPATIAL if axis in extents))
        self.dtype = np.dtype(opened.array.dtype)

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Read the part at an index (C, H, W) or (C, Z, H, W), such as `slab.index`.

        Raises:
            ValueError: The file is damaged, or its compression is not known.
        """
        opened = self._open()
        axes, array = opened.axes, opened.array
        space = [axis for axis in _SPATIAL if axis in axes]
        chosen = dict(zip(space, index[1:], strict=True))
        others = [axis for axis in axes if axis not in _SPATIAL]
        channels = range(*index[0].indices(self.shape[0]))
        if len(others) == 1:  # no other channels are read
            chosen[others[0]] = index[0]
        with damaged(f"{self.path} cannot be read", "; restore it."):
            values = np.asarray(array[tuple(chosen.get(axis, slice(None)) for axis in axes)])
        values = values.transpose([axes.index(axis) for axis in (*others, *space)])
        count = math.prod(values.shape[: len(others)])
        values = values.reshape(count, *values.shape[len(others) :])
        return values if len(others) == 1 else values[channels.start : channels.stop]


class _Opened:
    """An open file.

    Attributes:
        axes: The letters of its dims.
        array: Its array, of which nothing is read yet.
    """

    def __init__(self, file: Any, level: int, zarr: Any) -> None:
        # before Python's collector finalizes what is in the file, in any order
        weakref.finalize(self, file.close)
        levels = file.series[0].levels
        _refuse_lost_pages(file)
        if level >= len(levels):
            raise ValueError(f"it has {len(levels)} levels, and no level {level}")
        self.axes = str(levels[level].axes)
        self.array = zarr.open(levels[level].aszarr(), mode="r")


def _refuse_lost_pages(file: Any) -> None:
    """Refuse a file that was cut off: tifffile reads the pages that are left, as if they were all.

    Raises:
        ValueError: Its last page names another one, which is not there.
    """
    link = file.pages.next_page_offset
    if link is not None:
        file.filehandle.seek(link)
        stored = file.filehandle.read(file.tiff.offsetsize)
        place = int.from_bytes(stored, "little" if file.byteorder == "<" else "big")
        if place >= file.filehandle.size:
            raise ValueError(f"pages from {len(file.pages)} on are missing")


def _open(path: Path, level: int) -> _Opened:
    """Open a file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no TIFF file, or lacks the level.
    """
    tifffile = optional("tifffile", f"the file {path}", "tiff")
    zarr = optional("zarr", f"the file {path}", "tiff")
    if not path.exists():
        raise FileNotFoundError(f"the picture {path} does not exist; check its name.")
    with damaged(f"{path} is not a whole TIFF file"):
        return _Opened(tifffile.TiffFile(path), level, zarr)
