"""What offloaded blocks ask of a device, asked of a simulated one."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_shard.fsdp import offload
from tests.fsdp.streams import Machine


class SimulatedDriver(offload.Driver):
    """Every tensor is on the device, but for those that it made on the host."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def holds(self, tensor: Tensor) -> bool:
        return not self.machine.is_on_host(tensor)

    def current(self, device: torch.device) -> Any:
        return self.machine.current

    def beside(self, device: torch.device, way: str) -> Any:
        return self.machine.beside[way]

    def on_host(self, tensor: Tensor) -> Tensor:
        with self.machine.host():
            return torch.empty_like(tensor)

    def on_device(self, host: Tensor, device: torch.device) -> Tensor:
        return torch.empty_like(host)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.machine.record_stream(tensor, stream)


def on_machine(
    program: Callable[[], Any], ahead: int, small: int = 0, drop: int | None = None
) -> tuple[Machine, Any]:
    """The machine, and what a program returns on it.

    Args:
        program: Forwards and backwards.
        ahead: Bytes that may be near.
        small: Bytes below which tensors stay.
        drop: The call that is left out, see `Machine`.
    """
    with (
        Machine(drop) as machine,
        mock.patch.object(offload, "MOVER", offload.Mover(SimulatedDriver(machine))),
        mock.patch.multiple(offload, AHEAD_BYTES=ahead, SMALL_BYTES=small),
    ):
        found = program()
    return machine, found
