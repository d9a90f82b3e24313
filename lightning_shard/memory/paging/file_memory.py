"""Gives memory in files of a directory to tensors that are not on the device."""

import os
import tempfile
from bisect import bisect, insort
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.memory.paging.host_memory import Memory

FILE_BYTES = 2**28  # the least that is mapped at once
_ALIGNED = 64  # bytes, so that a part can be seen in any dtype


class _Gap(NamedTuple):
    """Describes bytes of a file that nobody uses.

    Attributes:
        file: The address of the mapped file.
        start: The first byte.
        end: The byte after the last one.
    """

    file: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.end - self.start


class FileMemory(Memory):
    """Files of a directory, mapped into memory.

    The operating system writes them to the disk when it needs the memory for something else. A file
    loses its name as soon as it is mapped, so nothing of it is left when the process ends, in
    whatever way: by an error, by Ctrl-C, by a signal that kills it.

    Args:
        folder: A directory on a disk with room for all tensors that wait.

    Raises:
        ValueError: There is no such directory, or no file can be made in it.
    """

    waits = True

    def __init__(self, folder: str | Path) -> None:
        """Try whether files can be made."""
        super().__init__()
        self.folder = Path(folder)
        self._files: dict[int, Tensor] = {}  # by their addresses
        self._gaps: list[_Gap] = []  # in the order of their places
        self._returned = deque[Tensor]()
        try:
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise ValueError(
                f"tiles cannot wait in files of {str(folder)!r}: {error.strerror}; give a "
                "directory that exists and can be written."
            ) from error

    def give_back(self, room: Tensor) -> None:
        """Keep the place in the file for the next tensor."""
        self._returned.append(room)  # Python may collect a tensor while a place is looked for

    @override
    def _bytes(self, count: int) -> Tensor:
        """Take a place in the smallest gap that is large enough."""
        while self._returned:
            part = self._returned.pop()
            start = int(part.storage_offset())
            self._add(_Gap(part.untyped_storage().data_ptr(), start, start + _whole(len(part))))
        size = _whole(count)
        fitting = [gap for gap in self._gaps if gap.size >= size]
        gap = min(fitting, key=lambda gap: gap.size) if fitting else self._gap_of_new_file(size)
        self._gaps.remove(gap)
        if gap.size > size:
            insort(self._gaps, gap._replace(start=gap.start + size))
        return self._files[gap.file][gap.start : gap.start + count]

    def _add(self, gap: _Gap) -> None:
        """Add a gap, joined to those beside it."""
        place = bisect(self._gaps, gap)
        near = self._gaps[max(0, place - 1) : place + 1]
        for other in (other for other in near if other.file == gap.file):
            if other.end == gap.start or other.start == gap.end:
                gap = _Gap(gap.file, min(gap.start, other.start), max(gap.end, other.end))
                self._gaps.remove(other)
        insort(self._gaps, gap)

    def _gap_of_new_file(self, size: int) -> _Gap:
        """Map a file that tensors of this size fill, after files that hold nothing have gone."""
        for gap in [gap for gap in self._gaps if gap.size == len(self._files[gap.file])]:
            self._gaps.remove(gap)
            del self._files[gap.file]
        file = self._file(-(-FILE_BYTES // size) * size)
        gap = _Gap(file.data_ptr(), 0, len(file))
        self._files[gap.file] = file
        insort(self._gaps, gap)
        return gap

    def _file(self, count: int) -> Tensor:
        """Return a mapped file, whose room on the disk is taken."""
        try:
            with tempfile.NamedTemporaryFile(prefix="lightning_shard_", dir=self.folder) as file:
                # a full disk is an error here, no signal
                os.posix_fallocate(file.fileno(), 0, count)
                return torch.from_file(file.name, shared=True, size=count, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"{str(self.folder)!r}, where tiles wait, has no room for {count / 2**20:.0f} MiB "
                f"more beside {self.held / 2**20:.0f} MiB ({str(error).splitlines()[0]}); give a "
                "directory on a larger disk."
            ) from error


def _whole(count: int) -> int:
    """Return the bytes of a place in a file."""
    return -(-max(count, 1) // _ALIGNED) * _ALIGNED
