"""Counts what offloaded activations move, by the mover of a real step on the clock of a ledger.

The mover decides as on a device. Nothing is copied: storages of fake tensors have no bytes. Copies
to the host, and those back, follow each other on a link of their own. What computes goes on beside
them, up to an operation that needs the memory of a copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from typing_extensions import override

from lightning_shard.lab.timeline import Ledger
from lightning_shard.memory.offload import Mover
from lightning_shard.memory.paging.host_memory import Memory, Room, sizes_of_parts
from lightning_shard.memory.paging.pages import Driver
from lightning_shard.memory.saved import Kept
from lightning_shard.processes.torch_private.internals import FakeTensor, without_modes


class Counted(Mover):
    """Moves what autograd keeps, in a ledger alone."""

    def __init__(self, ledger: Ledger) -> None:
        """Move nothing yet."""
        super().__init__(_OfLedger(ledger), Memory())
        self._ledger = ledger

    def __deepcopy__(self, memo: Any) -> "Counted":
        return self

    @override
    def pack(self, budget: int | None, tensor: Tensor) -> Kept:
        """Hook of autograd, which counts the tensor as an activation."""
        if self.driver.holds(tensor):
            self._ledger.hold([tensor], "activations")
        return super().pack(budget, tensor)


class _OfLedger(Driver):
    """Takes all tensors for those of a device whose time and memory a ledger counts."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._clock = ledger, _Clock(ledger)
        self._links = {way: _Link(ledger, way) for way in ("out", "back")}

    @override
    def holds(self, tensor: Tensor) -> bool:
        return type(tensor) in (Tensor, FakeTensor)

    @override
    def current(self, device: torch.device) -> Any:
        return self._clock

    @override
    def beside(self, device: torch.device, way: str) -> Any:
        return self._links[way]

    @override
    def flat(self, storage: UntypedStorage) -> Tensor:
        return _shape_of(storage.nbytes())

    @override
    def parts(self, storage: UntypedStorage, sizes: list[int]) -> Sequence[Tensor]:
        return [_shape_of(size) for size in sizes]

    @override
    def room(self, memory: Memory, count: int) -> Room:
        room = Room(memory, [_shape_of(count)], sum(sizes_of_parts(count)))
        self._ledger.on_host = max(self._ledger.on_host, memory.held)
        return room

    @override
    def copy(self, to: Tensor, source: Tensor, way: str) -> None:
        self._links[way].carry(len(to))

    @override
    def free(self, storage: UntypedStorage) -> None:
        self._ledger.resize(storage, 0)

    @override
    def allocate(self, storage: UntypedStorage, count: int) -> None:
        self._ledger.resize(storage, count)

    @override
    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """There is one stream that computes."""


class _Stream:
    """A stream of a device, on the clock of a ledger; its events are moments."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class _Clock(_Stream):
    """The stream that computes."""

    def wait_event(self, moment: float) -> None:
        self._ledger.wait_until(moment)

    def record_event(self) -> float:
        return self._ledger.seconds


class _Link(_Stream):
    """The stream of all copies of one way."""

    def __init__(self, ledger: Ledger, way: str) -> None:
        super().__init__(ledger)
        self._way, self._free = way, 0.0

    def wait_stream(self, computing: _Clock) -> None:
        self._free = max(self._free, self._ledger.seconds)

    def carry(self, count: int) -> None:
        self._free += self._ledger.carry(count, self._way)

    def record_event(self) -> float:
        return self._free


def _shape_of(count: int) -> Tensor:
    """Return bytes without memory."""
    with without_modes():
        return torch.empty(count, dtype=torch.uint8, device="meta")
