"""Compares the devices and processes that a Trainer is asked for with this machine and launcher.

Every rank knows all of it from its own environment, so all ranks refuse together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_shard.processes.device import accelerators, device_of, sees_own_device_only
from lightning_shard.processes.process_info import launcher, process_info
from lightning_shard.processes.variables import ProcessInfo
from lightning_shard.trainer.process_mesh import Misfit, domain_that_is_left, misfit


def meant(accelerator: Any) -> Any:
    """Return this machine's device for "auto" and "gpu" where Lightning would not find it."""
    there = [row for row in accelerators() if row.module.is_available()]
    if accelerator in ("auto", "gpu") and not all(row.found_by_lightning for row in there):
        return there[0].type
    return accelerator


def count_of(devices: Any) -> int | None:
    """Count the devices that an option asks for on one node; None if Lightning chooses."""
    if isinstance(devices, str) and not devices.isdigit():
        numbers = [part for part in devices.split(",") if part.strip()]
        return len(numbers) if "," in devices else None
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return int(devices) if int(devices) >= 0 else None


def device_kind(accelerator: Any, *, guess: bool = False) -> str | None:
    """Return the type of the devices asked for; None for the CPU, Apple's GPU and other names."""
    rows = accelerators()
    if accelerator in [row.type for row in rows]:
        return accelerator
    found = next(row for row in rows if row.found_by_lightning)
    if accelerator == "gpu":
        return None if torch.backends.mps.is_available() else found.type
    return found.type if accelerator == "auto" and guess and found.module.is_available() else None


@dataclass(frozen=True)
class Asked:
    """The options of a Trainer that say where it runs.

    Attributes:
        accelerator: The type of its devices, or a word for it.
        devices: The devices on each node: a number, a list, or a word.
        num_nodes: The number of nodes.
    """

    accelerator: Any
    devices: Any
    num_nodes: int

    @property
    def sees_own_device(self) -> bool:
        """True if the launcher shows each process of this node one device, its own."""
        started, kind = _started(), device_kind(self.accelerator, guess=True)
        if started is None or kind is None:
            return False
        return sees_own_device_only(kind, started.local_world_size)

    @property
    def names_all(self) -> bool:
        """True if it asks for the devices of all processes of this node, each of which sees one."""
        started = _started()
        alike = started is not None and count_of(self.devices) == started.local_world_size
        return alike and device_kind(self.accelerator) is not None and self.sees_own_device

    def misfits(self, domain: Any, data: Any, *, devices_given: bool) -> Iterator[Misfit]:
        """Yield the options that cannot be satisfied, by their names below the Trainer's.

        Args:
            domain: The option domain_parallel_size; None for a strategy of others.
            data: The option data_parallel_size.
            devices_given: True if the user named the devices.

        Raises:
            ValueError: The variables of the launcher contradict each other.
        """
        kind, wanted = device_kind(self.accelerator), count_of(self.devices)
        available = 0 if kind is None else device_of(kind).count()
        if kind is not None and not available:
            name, problem = f"is '{self.accelerator}'", f" but this machine has no {kind} device"
            yield Misfit("accelerator", name, problem, "use cpu or auto")
        elif kind is not None and (wanted or 0) > available and not self.names_all:
            asked, problem = f"asks for {wanted} {kind} devices", f" but {available} are visible"
            yield Misfit("devices", asked, problem, f"use at most {available}")
        if devices_given:
            yield from self._other_processes(is_elastic=domain == "auto")
        world, reason = (None, "") if domain is None else self._world()
        if world is None:
            return
        domain = domain_that_is_left(world, data) if domain == "auto" else domain
        sizes = tuple(domain) if isinstance(domain, list | tuple) else (domain,)
        if found := misfit(world, sizes, data):
            is_one = world == 1 and found.option == "domain_parallel_size"
            remedy = found.remedy + ", or more devices" * is_one
            problem = f"{found.problem} ({reason})"
            yield Misfit(f"strategy.{found.option}", found.size, problem, remedy)

    def _other_processes(self, *, is_elastic: bool) -> Iterator[Misfit]:
        devices, started = count_of(self.devices), _started()
        if devices is None or started is None:
            return
        world, local, by = started.world_size, started.local_world_size, launcher().title
        devices = local if devices == 1 and self.sees_own_device else devices
        # the nodes that an elastic launcher has are enough
        nodes = max(1, world // devices) if is_elastic else self.num_nodes
        if (asked := devices * nodes) != world:
            fix = f"devices {local} and num_nodes {world // local}"
            many = f"asks for {asked} process{'es' * (asked > 1)}"
            yield Misfit(
                "devices",
                f"{many} (devices {devices} x num_nodes {self.num_nodes})",
                f" but {by} started {world}",
                f"use {'devices auto' if world % local else fix}, or start {asked} with {by}",
            )

    def _world(self) -> tuple[int | None, str]:
        """Return the number of processes, if it is known, and where it comes from in words."""
        if started := _started():
            name = launcher().world_size or "processes"
            return started.world_size, f"{name} {started.world_size}"
        devices, kind = count_of(self.devices), device_kind(self.accelerator, guess=True)
        if self.devices == "auto" and (kind is not None or self.accelerator in ("cpu", "auto")):
            devices = device_of(kind or "cpu").module.device_count()
        if devices is None:
            return None, ""
        return devices * self.num_nodes, f"devices {devices} x num_nodes {self.num_nodes}"


def _started() -> ProcessInfo | None:
    """Describe this process among those of a launcher; None where the Trainer starts them."""
    return process_info() if launcher().starts_all else None
