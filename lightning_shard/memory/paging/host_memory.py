"""Gives the memory in which tensors lie while they are not on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

_WASTED = 8  # one of so many bytes may be taken and not used


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
        return torch.empty(count, dtype=torch.uint8, pin_memory=self._pinned, device="cpu")


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
