"""Makes the tensors of a traced step on a device, in the memory in which the step had them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_shard.memory.free import free_bytes, free_here
from lightning_shard.processes.torch_private.internals import FakeTensor, tree_leaves

SHARE = 2  # tensors take a half of the free memory at most


@dataclass(frozen=True)
class Part:
    """A tensor of a traced step: a part of some memory.

    Attributes:
        memory: An object that stands for the memory.
        size: The bytes of the memory.
        offset: The place of its first number.
        shape: Its extents.
        stride: The steps in memory along its dims.
        dtype: The type of its numbers.
        whole: Its numbers, if it has any and they are integers, such as indices.
    """

    memory: Any
    size: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    whole: Tensor | None

    def __repr__(self) -> str:
        return f"{self.dtype} {self.shape} {self.stride}"

    def looks_like(self, other: "Part") -> bool:
        """Return whether another part of the same memory is the same tensor."""
        return (
            self.shape == other.shape and self.stride == other.stride
            and self.offset == other.offset and self.dtype is other.dtype
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        """The bytes that its memory must have."""
        pairs = zip(self.shape, self.stride, strict=True)
        extent = self.offset + 1 + sum(max(0, n - 1) * by for n, by in pairs)
        return max(self.size, extent * self.dtype.itemsize)


def part_of(x: Tensor, memory: Any) -> Part:
    """Describe a tensor that lies in some memory."""
    has_numbers = not (x.is_floating_point() or x.is_complex() or isinstance(x, FakeTensor))
    return Part(
        memory, x.untyped_storage().nbytes(), int(x.storage_offset()), tuple(x.shape), x.stride(),
        x.dtype, x.detach().clone() if has_numbers else None,
    )  # fmt: skip


class StepMemory:
    """The memory of a step whose operators are run again and again.

    What an operator makes lies there until the last operator that uses it. What the step found when
    it began, such as parameters, is made at random when it is first used, and stays. So is what had
    to leave since there was no more room. Between two operators little is done here, since that
    would take from the caches what they hold.
    """

    def __init__(
        self, operators: Sequence[tuple[list[Part], list[Part]]], device: torch.device
    ) -> None:
        """Find when memory is made, and when it is used last."""
        self._device = device
        # the part and the tensor that were made in some memory
        self._of: dict[int, tuple[Part, Tensor]] = {}
        self._held = 0
        self._used = [{id(part.memory) for each in both for part in each} for both in operators]
        found, made, last = set[int](), set[int](), dict[int, int]()
        for place, (given, results) in enumerate(operators):
            found |= {id(part.memory) for part in given} - made
            made |= {id(part.memory) for part in results} - found
            last |= dict.fromkeys(self._used[place], place)
        self._ends = [{key for key in keys if last[key] == place and key in made}
                      for place, keys in enumerate(self._used)]  # fmt: skip
        free = free_bytes(device)
        self._room = (free_here()[0] if free is None else free) // SHARE

    def tensor(self, part: Part) -> Tensor:
        """Return the tensor of a part.

        Raises:
            RuntimeError: There is no memory for it.
        """
        if part.whole is not None:
            return part.whole.to(self._device, copy=True)
        if (known := self._of.get(id(part.memory))) is not None:
            as_made, x = known
            # an operator may make another type of number here than where the step was traced
            if as_made.looks_like(part):
                return x
            if (storage := x.untyped_storage()).nbytes() >= part.bytes:
                other = torch.empty(0, dtype=part.dtype, device=self._device)
                return other.set_(storage, part.offset, part.shape, part.stride)
        new = self._new(part).as_strided(part.shape, part.stride, part.offset)
        self._hold(part, new)
        return new

    def _new(self, part: Part) -> Tensor:
        if part.bytes > self._room:
            raise RuntimeError("a tensor of the step is larger than the free memory")
        count = -(-part.bytes // part.dtype.itemsize)
        numbers = torch.zeros(count, dtype=part.dtype, device=self._device)
        has_fractions = part.dtype.is_floating_point or part.dtype.is_complex
        return numbers.normal_() if has_fractions else numbers

    def _hold(self, part: Part, x: Tensor) -> None:
        self._drop(id(part.memory))
        self._of[id(part.memory)] = part, x
        self._held += x.untyped_storage().nbytes()

    def _drop(self, key: int) -> None:
        if (known := self._of.pop(key, None)) is not None:
            self._held -= known[1].untyped_storage().nbytes()

    def keep(self, parts: Sequence[Part | None], made: Any) -> None:
        """Keep the tensors that an operator made; a traced one may make more than it was asked."""
        for part, x in zip(
            parts, [made] if isinstance(made, Tensor) else tree_leaves(made), strict=True
        ):
            if part is not None and isinstance(x, Tensor):
                self._hold(part, x)

    def give_back(self, place: int) -> None:
        """Give back what is used no more after an operator, or all that waits if room is short."""
        keys = self._ends[place]
        if self._held > self._room:
            keys = self._of.keys() - self._used[(place + 1) % len(self._used)]
        for key in keys:
            self._drop(key)
