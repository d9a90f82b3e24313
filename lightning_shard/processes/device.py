"""Says what this package knows of each type of device, as one row of `DEVICES`.

A new device is one more row. Where Lightning has no accelerator for it, `trainer/xpu` shows how one
is written.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

ONECCL = "oneccl_bindings_for_pytorch"


@dataclass(frozen=True)
class Rates:
    """Nanoseconds per unit of work of one rank, by which spectra choose their method.

    Attributes:
        flop: Per floating-point operation of a matrix product.
        touch: Per byte that is read or written once.
        fft: Per byte that is transformed, at an extent of small prime factors.
        send: Per byte that goes to another rank.
        start: Per collective.
        call: Per kernel, which the host starts.
    """

    flop: float
    touch: float
    fft: float
    send: float
    start: float
    call: float = 0.0


# An H100, as `calibrate` measured it (lab/machines/H100.json), with NVLink from its data sheet;
# other accelerators are taken for one.
_ACCELERATOR = Rates(flop=1.9e-5, touch=4.3e-4, fft=1.05e-3, send=3e-3, start=2e4, call=9e3)


@dataclass(frozen=True)
class Device:
    """A type of device.

    Attributes:
        type: Its name in torch, whose module `torch.<type>` it has.
        rates: Its speed.
        substitute: A backend for its collectives where this torch was built without its own, and
            the package that registers the backend.
        averages: True if its collectives average, and multiply while they sum. FSDP2 then asks for
            that; of other devices it asks for sums, which it divides.
        ends_groups: True if its backend warns of process groups that a program has not ended.
        found_by_lightning: True if Lightning's accelerators "auto" and "gpu" find it.
        shown_by: The variable that says which of its devices a process sees.
        lost: Words by which an error of its collectives says that another rank is gone.
    """

    type: str
    rates: Rates = _ACCELERATOR
    substitute: tuple[str, str] | None = None
    averages: bool = False
    ends_groups: bool = False
    found_by_lightning: bool = False
    shown_by: str = ""
    lost: tuple[str, ...] = ()

    @property
    def module(self) -> Any:
        """The module of torch that speaks to its driver."""
        return getattr(torch, self.type)

    @property
    def computes_bfloat16(self) -> bool:
        """True if its cores compute in bfloat16, as torch finds; the CPU's cores do so slowly."""
        supported = getattr(torch.get_device_module(self.type), "is_bf16_supported", None)
        return supported is not None and supported(including_emulation=False)

    def count(self) -> int:
        """Count the devices that this process sees."""
        return self.module.device_count() if self.module.is_available() else 0


# The first that a machine has is the one that a script takes by default.
DEVICES: tuple[Device, ...] = (
    Device(
        "cuda", averages=True, ends_groups=True, found_by_lightning=True,
        shown_by="CUDA_VISIBLE_DEVICES",
    ),
    Device("xpu", substitute=("ccl", ONECCL), shown_by="ZE_AFFINITY_MASK", lost=("oneCCL",)),
    Device(  # measured on one core of an AMD EPYC with gloo
        "cpu", Rates(flop=0.015, touch=0.25, fft=0.9, send=0.8, start=1e5, call=5e3),
        lost=("gloo/transport",),
    ),
)  # fmt: skip


def accelerators() -> list[Device]:
    """Give the rows of all devices but the CPU, which every machine has."""
    return [row for row in DEVICES if row.type != "cpu"]


def device_of(device_type: str) -> Device:
    """Find the row of a type; of one that only torch knows, make a row that promises least."""
    return next((row for row in DEVICES if row.type == device_type), Device(device_type))


def present() -> str:
    """Find the type of the first device that this machine has."""
    return next((row.type for row in accelerators() if row.module.is_available()), "cpu")


def available_backends() -> list[str]:
    """Name the process-group backends that this torch has, but for the one of its own tests."""
    there = [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]
    return [name for name in there if name not in ("undefined", "fake")]


def carried() -> str:
    """Return the device type of the process group: gloo, which can carry all, is for the CPU."""
    return next((device for device, backend in backends().items() if backend != "gloo"), "cpu")


def backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return the backend of each device type that a process group carries, by default of all."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def own_device(device_type: str | None, local_rank: int, local_world_size: int) -> torch.device:
    """Return the device of the process with this local rank.

    Args:
        device_type: "cuda", "xpu" or "cpu"; None: the type of the process group, or the first
            that this machine has.
        local_rank: The rank among the processes of this node.
        local_world_size: Their number.

    Raises:
        RuntimeError: The machine has fewer devices.
    """
    if device_type is None:
        device_type = carried() if dist.is_initialized() else present()
    if device_type == "cpu":
        return torch.device("cpu")
    count = torch.get_device_module(device_type).device_count()
    index = 0 if count == 1 else local_rank  # a launcher may show each process its own only
    if index >= count:
        what = "no device" if count == 0 else f"{count} devices"
        raise RuntimeError(
            f"this machine has {what} of type {device_type!r} for its {local_world_size} "
            f"processes; start {count or 'them with device_type cpu, or on a machine with devices'}"
            f"{' processes for each node' if count else ''}."
        )
    return torch.device(device_type, index)


def sees_own_device_only(device_type: str, local_world_size: int) -> bool:
    """Return whether the launcher shows each of the node's processes one device, its own.

    SLURM's `--gpus-per-task` does so, and a CUDA_VISIBLE_DEVICES or ZE_AFFINITY_MASK per rank. That
    the devices differ is compared when the process group starts.
    """
    return device_type != "cpu" and local_world_size > 1 and device_of(device_type).count() == 1


def default_backend(device: torch.device) -> str:
    """Choose the process-group backend for tensors of `device`: nccl, xccl, ccl or gloo.

    It is torch's own. Where this torch was built without it, the device's substitute is imported.

    Raises:
        RuntimeError: Neither is installed.
    """
    backend = dist.get_default_backend_for_device(device)
    substitute = device_of(device.type).substitute
    if substitute is None or dist.is_backend_available(backend):
        return backend
    other, package = substitute
    if importlib.util.find_spec(package) is not None:
        importlib.import_module(package)  # registers the backend
        return other
    raise RuntimeError(
        f"training on {device} needs torch's {backend} backend, without which torch "
        f"{torch.__version__} was built, or the package {package}, which is not installed; install "
        f"torch's build for {device.type.upper()}."
    )


def let_gloo_stand_beside(device_type: str) -> None:
    """Let groups of gloo be made beside a default group that is bound to a device of this type.

    torch asks each new group for its backend on that device, and knows gloo for the CPU and CUDA
    only; on Intel GPUs `new_group(backend="gloo")` would raise, in Lightning's `prepare_data` too
    (https://github.com/pytorch/pytorch/issues/162237, open with torch 2.15).
    """
    known = dist.Backend.backend_capability[dist.Backend.GLOO]
    if device_type not in known:
        known.append(device_type)
