"""What offloaded blocks ask of a device, asked of a simulated one."""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_shard.memory import made_again, offload
from lightning_shard.memory.paging.host_memory import Memory, Room
from lightning_shard.memory.paging.pages import Driver
from lightning_shard.processes.torch_private.internals import without_modes
from tests.memory.streams import Machine


class SimulatedDriver(Driver):
    """Every tensor is on the device, but for those that it made on the host."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def holds(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor and not self.machine.is_on_host(tensor)

    def current(self, device: torch.device) -> Any:
        return self.machine.current

    def beside(self, device: torch.device, way: str) -> Any:
        return self.machine.beside[way]

    def flat(self, storage: torch.UntypedStorage) -> Tensor:
        with without_modes():  # it is no kernel
            return super().flat(storage)

    def parts(self, storage: torch.UntypedStorage, sizes: list[int]) -> Sequence[Tensor]:
        with without_modes():
            return super().parts(storage, sizes)

    def room(self, memory: Memory, count: int) -> Room:
        with self.machine.host():
            return memory.take(count)

    def free(self, storage: torch.UntypedStorage) -> None:
        self.machine.free(storage)
        with without_modes():
            storage.resize_(0)

    def allocate(self, storage: torch.UntypedStorage, count: int) -> None:
        with without_modes():
            storage.resize_(count)
            self.machine.allocate(super().flat(storage))

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.machine.record_stream(tensor, stream)


def on_machine(
    program: Callable[[], Any],
    ahead: int,
    small: int = 0,
    drop: Collection[int] = (),
    memory: type[Memory] = Memory,
    *,
    cheap: bool = True,
) -> tuple[Machine, Any]:
    """The machine, and what a program returns on it.

    Args:
        program: Forwards and backwards.
        ahead: Bytes that may be near.
        small: Bytes below which tensors stay.
        drop: The calls that are left out, see `Machine`.
        memory: The memory of the host.
        cheap: Whether what cheap functions made is made again.
    """
    with (
        Machine(drop) as machine,
        mock.patch.object(offload, "MOVER", offload.Mover(SimulatedDriver(machine), memory())),
        mock.patch.multiple(offload, AHEAD_BYTES=ahead, SMALL_BYTES=small),
        nullcontext() if cheap else mock.patch.object(made_again, "_CHEAP", {}),
    ):
        found = program()
    return machine, found
