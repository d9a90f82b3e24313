"""Keeps account of what a rank that computes on fake tensors would take: seconds and bytes."""

import math
import weakref
from bisect import bisect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_shard.lab.machine import Device
from lightning_shard.processes.torch_private.internals import storage_key

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_FFT_FLOPS = 5  # times n log2(n), of complex numbers
HOST_RATE = 25e9  # bytes a second between device and host, of 16 lanes of PCIe 4 in practice
THIN = 8  # channels, on either side of a convolution, below which its kernels are slower
_NO_KERNEL = ("empty", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift_fresh")


@dataclass(frozen=True)
class Peak:
    """Where a step holds most.

    Attributes:
        bytes: How much.
        place: What computes there, in words.
        causes: Bytes by what holds them.
    """

    bytes: int = 0
    place: str = ""
    causes: dict[str, int] = field(default_factory=dict[str, int])


@dataclass
class _Memory:
    """What tensors share.

    Attributes:
        sizes: Bytes, each with the number of the operation from which on it has them.
        cause: Why it is held; "" if nobody said so.
        of: The storage, if it can be resized.
    """

    sizes: list[tuple[int, int]]
    cause: str = ""
    of: Any = None

    def at(self, operation: int) -> int:
        place = bisect(self.sizes, operation, key=lambda one: one[0])
        return self.sizes[place - 1][1] if place else 0


class Ledger:
    """Is told of each operation.

    Attributes:
        seconds: Of all operations so far, on the device.
        place: What computes now, in words; set by who follows the step.
    """

    def __init__(self, device: Device) -> None:
        """Count what the device would take."""
        self.seconds = 0.0
        self.place = ""
        self._device = device
        self._live: dict[int, _Memory] = {}
        self._resized: dict[int, _Memory] = {}  # memory that FSDP2 gives back and takes again
        self._all: list[_Memory] = []  # of this step
        self._held = self._operation = self._peak_at = self._most = 0
        self._peak_place = ""

    def next_step(self) -> None:
        """Begin a step, and forget the one before."""
        self._operation = self._peak_at = self._most = 0
        self._all = list(self._live.values())
        for memory in self._all:
            memory.sizes = [(0, memory.sizes[-1][1])]
            memory.cause = memory.cause if memory.cause == "gathered" else ""

    @property
    def peak(self) -> Peak:
        """Where this step held most so far."""
        causes = Counter[str]()
        for memory in self._all:
            causes[memory.cause or "temporary"] += memory.at(self._peak_at)
        return Peak(self._most, self._peak_place, {k: v for k, v in causes.items() if v})

    def hold(self, tensors: Iterable[Tensor], cause: str) -> None:
        """Count the memory of tensors, and say why it is held, unless that was said before."""
        for x in tensors:
            memory = self._see(x)
            memory.cause = memory.cause or cause

    def to_host(self, x: Tensor) -> None:
        """Move the memory of a tensor to the host, behind what computes."""
        memory = self._see(x)
        self.seconds += memory.sizes[-1][1] / HOST_RATE
        self._resize(memory, 0, self._operation)

    def from_host(self, x: Tensor) -> None:
        """Move it back."""
        memory, size = self._see(x), x.untyped_storage().nbytes()
        self.seconds += size / HOST_RATE
        self._resize(memory, size, self._operation)

    def note(self, operator: Any, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> None:
        """Count one operation.

        Args:
            operator: Of torch.ops.
            args: Its arguments.
            kwargs: Its arguments by name.
            given: The tensors among them.
            out: What it gave.
        """
        self._operation += 1
        made = [x for x in (out if isinstance(out, list | tuple) else [out]) if _is_tensor(x)]
        known = {storage_key(x) for x in given}
        of_fsdp = operator.namespace == "fsdp"
        for x in (*given, *made):
            memory = self._see(x)
            if of_fsdp and memory.cause in ("", "gathered"):
                memory.cause, memory.of = "gathered", weakref.ref(x.untyped_storage())
                self._resized[storage_key(x)] = memory
        writes = "out" in kwargs or operator.overloadpacket.__name__.endswith("_")
        if writes or any(storage_key(x) not in known for x in made):
            self.seconds += self._cost(operator, args, kwargs, out, [*given, *made])
        self._count_resized(all_of_them=of_fsdp)
        if self._held > self._most:
            self._most, self._peak_at, self._peak_place = self._held, self._operation, self.place

    def _see(self, x: Tensor) -> _Memory:
        key = storage_key(x)
        found = self._live.get(key)
        if found is None:
            storage = x.untyped_storage()
            found = self._live[key] = _Memory([(self._operation, storage.nbytes())])
            self._all.append(found)
            self._held += storage.nbytes()
            weakref.finalize(storage, self._forget, key)
        return found

    def _forget(self, key: int) -> None:
        memory = self._live.pop(key)
        self._resized.pop(key, None)
        self._resize(memory, 0, self._operation + 1)

    def _count_resized(self, *, all_of_them: bool) -> None:
        """What has no memory gets some before an operation of FSDP2 only."""
        for memory in self._resized.values():
            if all_of_them or memory.sizes[-1][1]:
                storage = memory.of()
                self._resize(memory, 0 if storage is None else storage.nbytes(), self._operation)

    def _resize(self, memory: _Memory, size: int, operation: int) -> None:
        before = memory.sizes[-1][1]
        if size != before:
            self._held += size - before
            memory.sizes.append((operation, size))

    def _cost(self, operator: Any, args: Any, kwargs: Any, out: Any, used: list[Tensor]) -> float:
        if operator.overloadpacket.__name__ in _NO_KERNEL:
            return 0.0
        device, dtype = self._device, used[-1].dtype
        moved = sum(x.numel() * x.element_size() for x in used)
        kind = str(_REAL.get(dtype, dtype)).removeprefix("torch.")
        flops = _flops(operator, args, kwargs, out)
        rate = device.flops_of(_kernel(operator, args), kind) if flops else 1.0
        return max(moved / device.bandwidth_of(moved), flops / rate, device.per_call)


def _kernel(operator: Any, args: Any) -> str:
    """The kind of kernel, as `Device.kernels` names it."""
    name: str = operator.overloadpacket.__name__
    if name.startswith("_fft_"):
        return "fft"
    if name not in ("convolution", "convolution_backward"):
        return ""
    weight = args[2] if name.endswith("_backward") else args[1]
    return f"thin_{name}" if min(weight.shape[:2]) < THIN else name


def _flops(operator: Any, args: Any, kwargs: Any, out: Any) -> float:
    packet: Any = operator.overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out)
    name = packet.__name__
    if name.startswith("_fft_"):
        numbers = max(args[0].numel(), out.numel())
        extent = math.prod(max(args[0].shape[d], out.shape[d]) for d in args[1])
        return _FFT_FLOPS * numbers * math.log2(max(2, extent))
    return 0.0


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)
