"""What a wheel without XPU lacks below torch.xpu, in Python over torch.ops.fake_xpu."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

XPU = 12  # c10::DeviceType::XPU


def replace(devices: int, memory_bytes: int) -> None:
    """Put the fake functions in the places of the real ones."""
    fake: Any = torch.ops.fake_xpu
    fake.configure(devices, memory_bytes)
    _replace_device_functions(fake, devices, memory_bytes)
    _replace_memory_functions(fake, memory_bytes)
    _replace_streams(fake)
    _replace_xccl()


def calls() -> dict[str, int]:
    """How often each operation ran on the device since `forget_calls`."""
    return dict(torch.ops.fake_xpu.calls())


def forget_calls() -> None:
    """Count anew."""
    torch.ops.fake_xpu.forget_calls()


def _replace_device_functions(fake: Any, devices: int, memory_bytes: int) -> None:
    functions: Any = torch._C
    xpu: Any = torch.xpu

    def properties(device: int) -> Any:
        return SimpleNamespace(
            name=f"Fake XPU {device}", type="gpu", total_memory=memory_bytes,
            has_fp16=True, has_fp64=True, has_bfloat16_conversions=True,
            has_subgroup_matrix_multiply_accumulate=True,
        )  # fmt: skip

    def init() -> None:  # as the real one, which is called before the first use
        xpu.default_generators = tuple(fake.generator(index) for index in range(devices))
        xpu._get_device_properties = properties

    torch.cuda._is_compiled = lambda: False  # torch refuses to be of two accelerators
    functions._has_xpu = True
    functions._xpu_init = init
    functions._xpu_getDeviceCount = lambda: devices
    functions._xpu_getDevice = fake.current_device
    functions._xpu_setDevice = fake.exchange_device
    functions._xpu_synchronize = lambda device: None
    functions._xpu_exchangeDevice = functions._xpu_maybeExchangeDevice = fake.exchange_device
    xpu._exchange_device = xpu._maybe_exchange_device = fake.exchange_device


def _replace_memory_functions(fake: Any, memory_bytes: int) -> None:
    functions: Any = torch._C

    def free_and_total(device: int) -> tuple[int, int]:
        return memory_bytes - fake.memory(device)[0], memory_bytes

    def stats(device: int) -> dict[str, Any]:
        current, peak, allocated, freed, tensors, ooms = fake.memory(device)
        one = {"current": current, "peak": peak, "allocated": allocated, "freed": freed}
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        count = {"allocation": {"all": {"current": tensors}}, "num_ooms": ooms}
        return {kind: {"all": one} for kind in kinds} | count

    functions._xpu_emptyCache = lambda: None
    functions._xpu_getMemoryInfo = free_and_total
    functions._xpu_memoryStats = stats
    functions._xpu_resetPeakMemoryStats = fake.reset_peak
    functions._xpu_resetAccumulatedMemoryStats = fake.reset_accumulated


class Stream(torch.Stream):
    """torch.xpu.Stream, whose base class of C is torch.Stream too."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> "Stream":
        if ids:
            return super().__new__(cls, **ids)
        index = torch.xpu._utils._get_device_index(device, optional=True)
        return super().__new__(cls, torch.device("xpu", index), priority=priority)


class Event(torch.Event):
    """torch.xpu.Event, as a plain torch.Event: `elapsed_time` takes no object of a subclass."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Any:
        return torch.Event(torch.device("xpu"), enable_timing=enable_timing)


def _replace_streams(fake: Any) -> None:
    functions: Any = torch._C
    xpu: Any = torch.xpu

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        fake.set_stream(stream_id, device_index)

    functions._xpu_getCurrentStream = lambda index: (fake.current_stream(index), index, XPU)
    functions._xpu_setStream = set_stream
    functions._xpu_getCurrentRawStream = fake.current_stream  # imported by name in torch._dynamo
    xpu.Stream = xpu.streams.Stream = Stream
    xpu.Event = xpu.streams.Event = Event
    xpu.graphs._xpu_isCurrentStreamCapturing = lambda: False  # torch 2.11's optimizers ask


class XCCL:
    """ProcessGroupXCCL: makes a backend of gloo, which its group knows for XPU tensors only."""

    class Options:
        """What torch sets before it makes the backend."""

        _timeout: Any = None

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)


def _replace_xccl() -> None:
    module: Any = distributed_c10d
    module.ProcessGroupXCCL = XCCL
    module._XCCL_AVAILABLE = True
    gloo: Any = dist.ProcessGroupGloo  # as ProcessGroupXCCL: pytorch issue 186548
    gloo.supports_splitting = property(lambda self: False)
