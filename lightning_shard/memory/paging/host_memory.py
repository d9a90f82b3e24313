"""Gives the memory in which tensors lie while they are not on the device."""

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

CHUNK_BYTES = 2**28  # a file; a larger tensor has a file of its own
_WASTED = 8  # one of so many bytes may be taken and not used
_ALIGNED = 64  # bytes, so that a part can be seen in any dtype


class Room:
    """Bytes that lie in a memory until the last reference is gone.

    Attributes:
        parts: One after another, (n,) each, uint8, on the CPU.
    """

    __slots__ = ("_memory", "_taken", "parts")

    def __init__(self, memory: "Memory", parts: Sequence[Tensor], taken: int | None = None) -> None:
        """Count the bytes, or those that the memory has taken for them."""
        self._memory, self.parts = memory, parts
        self._taken = sum(map(len, parts)) if taken is None else taken
        memory.held += self._taken
        memory.peak = max(memory.peak, memory.held)

    def __del__(self) -> None:
        """Give the bytes back."""
        self._memory.held -= self._taken
        for part in self.parts:
            self._memory.give_back(part)

    @property
    def bytes(self) -> Tensor:
        """All bytes of a room of one part."""
        (part,) = self.parts
        return part

    def joined(self) -> "Room":
        """Return room of one part with the same bytes."""
        with torch.inference_mode(False):
            return Room(self._memory, [torch.cat([*self.parts])])


class Memory:
    """Memory of the host, pinned for a device that copies by itself.

    Attributes:
        held: Bytes that are in use.
        peak: The most bytes that were in use.
        waits: True if a copy has ended when the call returns.
    """

    waits = False

    def __init__(self, *, pinned: bool = False) -> None:
        """Begin with no bytes."""
        self.held = self.peak = 0
        self._pinned = pinned

    def take(self, count: int) -> Room:
        """Return room for so many bytes."""
        with torch.inference_mode(False):  # where a turn ends, nobody is in that mode
            return Room(self, [self._bytes(count)])

    def give_back(self, room: Tensor) -> None:
        """Note that nobody reads these bytes any more."""

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=self._pinned)


class MemoryInParts(Memory):
    """Memory of the host, where a tensor lies in parts of 1, 2, 4, 8 and so on bytes.

    Torch gives out pinned memory in such sizes alone, up to twice of what is asked for. The parts
    are at most an eighth more.
    """

    @override
    def take(self, count: int) -> Room:
        """Return room for so many bytes."""
        sizes, parts = sizes_of_parts(count), list[Tensor]()
        for size in sizes:
            count -= size
            parts.append(self._bytes(size)[: size + min(0, count)])
        return Room(self, parts, sum(sizes))


def sizes_of_parts(count: int) -> list[int]:
    """Return powers of two whose sum is as large as a count, or at most an eighth larger."""
    sizes, least = list[int](), count // _WASTED
    while count > 0:
        below = 1 << (count.bit_length() - 1)
        fits = 2 * below - count <= least and count != below
        sizes.append(2 * below if fits else below)
        count -= sizes[-1]
    return sizes


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
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by their sizes
        self._chunk = torch.empty(0, dtype=torch.uint8)  # the rest of the newest file
        try:
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise ValueError(
                f"tiles cannot wait in files of {str(folder)!r}: {error.strerror}; give a "
                "directory that exists and can be written."
            ) from error

    def give_back(self, room: Tensor) -> None:
        """Keep the place in the file for the next tensor of this size."""
        self._free[_whole(len(room))].append(room)

    def _bytes(self, count: int) -> Tensor:
        size = _whole(count)
        if self._free[size]:
            found = self._free[size].pop()
            # a tensor of another length of this size was here
            return found if len(found) == count else found.as_strided((count,), (1,))
        if size > len(self._chunk):
            file = self._file(max(size, CHUNK_BYTES))
            if size > CHUNK_BYTES // 2:
                return file[:count]
            self._chunk = file
        found, self._chunk = self._chunk[:count], self._chunk[size:]
        return found

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
    return -(-count // _ALIGNED) * _ALIGNED
