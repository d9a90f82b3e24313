"""Intel GPUs as a Lightning accelerator: `Trainer(accelerator="xpu")`.

Lightning 2.6 has none. Its own strategies take the CPU for one device of an accelerator that it
does not know, and DDP makes a stream of CUDA for each. So they are refused here.
Devices are those that ZE_AFFINITY_MASK shows, numbered from 0, as torch numbers them.
"""

import os
import sys
from typing import Any

import torch
from typing_extensions import override

from lightning_shard.lightning import (
    Accelerator,
    AcceleratorRegistry,
    DDPStrategy,
    MisconfigurationException,
    PossibleUserWarning,
    Trainer,
    rank_zero_warn,
)
from lightning_shard.processes.device import let_gloo_stand_beside
from lightning_shard.processes.narrow import is_list
from lightning_shard.processes.process_info import process_info
from lightning_shard.trainer.precision import use_device
from lightning_shard.trainer.xpu.random_isolation import isolate_random_numbers


class XPUAccelerator(Accelerator):
    """Intel GPUs, through torch's own `torch.xpu`."""

    @override
    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one, unless it is the CPU, which `setup` refuses."""
        if device.type == "xpu":
            torch.xpu.set_device(device)
            let_gloo_stand_beside("xpu")

    @override
    def setup(self, trainer: Trainer) -> None:
        """Mend what Lightning 2.6 makes for CUDA: precision and random numbers.

        Raises:
            MisconfigurationException: The strategy would not train on an Intel GPU.
        """
        kind, device = type(trainer.strategy), trainer.strategy.root_device
        if device.type != "xpu" or kind is DDPStrategy:
            raise MisconfigurationException(
                f"{kind.__name__} does not train on Intel GPUs in Lightning 2.6; pass "
                "strategy='hybrid_shard', which also works on one device, and by default averages "
                "the gradients of several as DDP does."
            )
        torch.xpu.set_device(device)
        use_device(trainer.precision_plugin, "xpu")
        isolate_random_numbers(trainer, device)
        torch.xpu.empty_cache()

    @override
    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Read memory in bytes as `torch.xpu.memory_stats` counts it, and the driver's counters.

        From the driver, where it does: `free_bytes` and `total_bytes` of the device, with all its
        processes, and `utilization_percent` (torch with `torch.xpu.utilization`, which takes 100 ms
        for a reading and needs Level Zero's Sysman library).
        """
        stats: dict[str, Any] = dict(torch.xpu.memory_stats(device))
        if memory := _ask_driver("mem_get_info", device):
            stats["free_bytes"], stats["total_bytes"] = memory
        utilization = _ask_driver("utilization", device)
        return stats if utilization is None else stats | {"utilization_percent": utilization}

    @override
    def teardown(self) -> None:
        """Give cached memory back to the device."""
        torch.xpu.empty_cache()

    @staticmethod
    @override
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Read which devices are asked for, as indices.

        Args:
            devices: "auto" or -1 for all, a number of devices, or indices: `[0, 1]`, `"0,1"`.

        Raises:
            MisconfigurationException: It is none of these, or asks for devices that are not there.
        """
        available = torch.xpu.device_count()
        asked = _read(devices)
        if asked == "auto":
            asked = XPUAccelerator.auto_device_count()
        elif asked == -1:
            asked = available
        indices = list(range(asked)) if isinstance(asked, int) else asked
        if not isinstance(indices, list) or not indices or len(set(indices)) < len(indices):
            raise MisconfigurationException(
                f"devices must be 'auto', -1, a number of 1 or more, or different indices such as "
                f"[0, 1] or '0,1'; got {devices!r}."
            )
        if available == 1 and indices == [*range(process_info().local_world_size)]:
            return [0]  # each of the node's processes sees one, its own
        if min(indices) < 0 or max(indices) >= available:
            mask = os.environ.get("ZE_AFFINITY_MASK")
            shown = f" (ZE_AFFINITY_MASK={mask})" if mask else ""
            raise MisconfigurationException(
                f"devices {devices!r} asks for Intel GPUs {indices}, but {available} are visible"
                f"{shown}; use at most {available}, with indices from 0 to {available - 1}."
            )
        return indices

    @staticmethod
    @override
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Give each process of this node one device."""
        return [torch.device("xpu", index) for index in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        """Count all that are visible, but one in an interactive session, as for CUDA."""
        available = torch.xpu.device_count()
        return min(available, 1) if hasattr(sys, "ps1") else available

    @staticmethod
    @override
    def is_available() -> bool:
        """Return whether torch sees an Intel GPU."""
        return torch.xpu.is_available()

    @staticmethod
    @override
    def name() -> str:
        """Return the name by which a Trainer knows it, "xpu"."""
        return "xpu"

    @classmethod
    def register(cls) -> None:
        """Give the accelerator its name, unless another package has taken it, or takes it later."""
        if cls.name() in AcceleratorRegistry:
            return
        own = AcceleratorRegistry.register
        own(cls.name(), cls, description="Intel GPUs")

        def register(name: str, *args: Any, **kwargs: Any) -> Any:
            known: Any = dict.get(AcceleratorRegistry, name, {})  # its own `get` makes one
            if known.get("accelerator") is cls:
                AcceleratorRegistry.remove(name)
            return own(name, *args, **kwargs)

        vars(AcceleratorRegistry)["register"] = register


def tell_of_unused_devices(device: torch.device) -> None:
    """Warn where a run takes the CPU although there is an Intel GPU."""
    if device.type == "cpu" and torch.xpu.is_available():
        rank_zero_warn(
            "An Intel GPU is available but not used (Lightning's 'auto' does not know it). "
            "Use it with Trainer(accelerator='xpu').",
            category=PossibleUserWarning,
        )


def _read(devices: Any) -> Any:
    """Read words as numbers: "2" is a number of devices, "0,1" and "0," are indices."""
    if isinstance(devices, str) and devices != "auto":
        words = [word.strip() for word in devices.split(",")]
        if not all(word.removeprefix("-").isdigit() for word in words if word):
            return None
        numbers = [int(word) for word in words if word]
        return numbers if "," in devices else numbers[0] if numbers else None
    if is_list(devices):
        return list(devices) if all(type(index) is int for index in devices) else None
    return devices if devices == "auto" or type(devices) is int else None


def _ask_driver(name: str, device: torch.device | str | int) -> Any:
    """Read a value of the driver by `torch.xpu`; None if torch, library or rights lack it."""
    ask = getattr(torch.xpu, name, None)
    try:
        return None if ask is None else ask(device)
    except (RuntimeError, ImportError):
        return None


XPUAccelerator.register()
