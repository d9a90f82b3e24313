"""Measures how fast a device runs the kernels that models use."""

import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.lab.machine import Device, Rates
from lightning_shard.processes.torch_private.typed import fft

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REAL_OF_FFT = (torch.float32, torch.float64)
LARGEST = 2**13  # no larger extent is tried
BYTES = tuple(2**n for n in range(14, 28, 2))  # the smallest tensors lie in caches
FEW, MANY = 3, 32  # channels
Made = tuple[Callable[[], Any], float]  # a call, and the floating-point operations of it
_backward: Any = torch.ops.aten.convolution_backward


def measured_device(device: torch.device, ranks: int, seconds: float) -> Device:
    """Measure the device of this rank; the other ranks of the machine do so at the same time.

    Args:
        device: The device of this rank.
        ranks: The number of ranks that share the memory of this machine, if they use its CPU.
        seconds: The length of each kernel that decides a rate; shorter ones are less exact.
    """
    bandwidths = [_bandwidth(device, size, seconds) for size in BYTES]
    return Device(
        name=_name(device),
        memory=_memory(device, ranks),
        flops=_products(device, seconds),
        bandwidth=bandwidths[-1][1],
        per_call=_per_call(device, seconds),
        source=f"measured with torch {torch.__version__}, threads {torch.get_num_threads()}",
        kernels={name: _rates(make, device, seconds) for name, make in KERNELS.items()},
        bandwidths=bandwidths,
    )


def _rates(make: Callable[..., Made], device: torch.device, seconds: float) -> Rates:
    dtypes = REAL_OF_FFT if make is _fft else DTYPES
    found = {str(dtype).removeprefix("torch."): _rate(make, device, dtype, seconds)
             for dtype in dtypes}  # fmt: skip
    return {name: rate for name, rate in found.items() if rate}


def _rate(
    make: Callable[..., Made], device: torch.device, dtype: torch.dtype, seconds: float
) -> float:
    """Operations a second of the first size that takes as long; 0 where there is no such kernel."""
    extent, rate = 32, 0.0
    while extent <= LARGEST:
        try:
            call, flops = make(device, dtype, extent)
            spent = seconds_of(call, device, seconds)
        except (RuntimeError, NotImplementedError):  # no such kernel, or no memory for it
            break
        rate = flops / spent
        if spent >= seconds:
            break
        extent *= 2
    return rate


def seconds_of(call: Callable[[], Any], device: torch.device, least: float) -> float:
    """Take the quickest of several calls: other work on the machine can only lengthen one.

    Args:
        call: Starts a kernel.
        device: The device that runs it.
        least: The seconds that all calls take together at least.
    """
    call()
    wait_for(device)
    seen: list[float] = []
    while len(seen) < 5 or sum(seen) < least:
        begin = time.perf_counter()
        call()
        wait_for(device)
        seen.append(time.perf_counter() - begin)
    return min(seen)


def wait_for(device: torch.device) -> None:
    """Wait until the kernels that were started have ended."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()


def _per_call(device: torch.device, seconds: float) -> float:
    """Measure kernels that follow each other, since a device starts the next while one runs."""
    x, times = torch.zeros(1, device=device), 100

    def calls() -> None:
        for _ in range(times):
            x.add(1)

    return seconds_of(calls, device, seconds) / times


def _bandwidth(device: torch.device, size: int, seconds: float) -> tuple[int, float]:
    """Return the bytes that a kernel moves, and bytes a second, with new memory for its result."""
    x = torch.zeros(size // 4, device=device)
    return 2 * size, 2 * size / seconds_of(lambda: x + 1, device, seconds)


def _matmul(device: torch.device, dtype: torch.dtype, extent: int) -> Made:
    x = torch.ones(extent, extent, device=device, dtype=dtype)
    return lambda: x @ x, 2.0 * extent**3


def _fft(device: torch.device, dtype: torch.dtype, extent: int) -> Made:
    x = torch.ones(16, extent, extent, device=device, dtype=dtype)
    return lambda: fft.rfft2(x), 5 * x.numel() * math.log2(extent**2)


@dataclass(frozen=True)
class _Convolution:
    """A kind of convolution that has a rate of its own.

    Attributes:
        given: Channels of the input.
        made: Channels of the output.
        kernel: Places of the kernel in each dim.
        stride: Its stride.
        last: True if channels lie side by side in memory.
    """

    given: int = MANY
    made: int = MANY
    kernel: int = 3
    stride: int = 1
    last: bool = False

    def forward(self, device: torch.device, dtype: torch.dtype, extent: int) -> Made:
        """Make the call, and count its operations."""
        x, weight = self._tensors(device, dtype, extent)
        rows = -(-extent // self.stride)
        flops = 2.0 * weight.numel() * rows**2
        return lambda: F.conv2d(x, weight, None, self.stride, self.kernel // 2), flops

    def backward(self, device: torch.device, dtype: torch.dtype, extent: int) -> Made:
        """Make the call of both gradients, and count its operations."""
        x, weight = self._tensors(device, dtype, extent)
        call, flops = self.forward(device, dtype, extent)
        y, padding, stride = call(), [self.kernel // 2] * 2, [self.stride] * 2
        wanted = [True, True, False]
        numbers = (stride, padding, [1, 1], False, [0, 0], 1, wanted)
        return lambda: _backward(y, x, weight, None, *numbers), 2 * flops

    def _tensors(
        self, device: torch.device, dtype: torch.dtype, extent: int
    ) -> tuple[Tensor, Tensor]:
        stored = torch.channels_last if self.last else torch.contiguous_format
        x = torch.ones(1, self.given, extent, extent, device=device, dtype=dtype)
        weight = torch.ones(self.made, self.given, *[self.kernel] * 2, device=device, dtype=dtype)
        return x.to(memory_format=stored), weight.to(memory_format=stored)


_KINDS = {
    "": _Convolution(), "thin_": _Convolution(given=FEW),
    "thin_strided_": _Convolution(given=FEW, made=2 * MANY, kernel=7, stride=2),
    "pointwise_": _Convolution(given=2 * MANY, made=2 * MANY, kernel=1),
    "last_": _Convolution(last=True),
}  # fmt: skip
KERNELS: dict[str, Callable[..., Made]] = {
    **{f"{kind}convolution": each.forward for kind, each in _KINDS.items()},
    **{f"{kind}convolution_backward": each.backward for kind, each in _KINDS.items()},
    "fft": _fft,
}


def _products(device: torch.device, seconds: float) -> Rates:
    """Rates of products; of those that TF32 shortens, too, on a device that may have it."""
    found = _rates(_matmul, device, seconds)
    if device.type != "cpu":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            found["tf32"] = _rate(_matmul, device, torch.float32, seconds)
        finally:
            torch.set_float32_matmul_precision(before)
    return found


def _name(device: torch.device) -> str:
    if device.type != "cpu":
        return str(torch.get_device_module(device.type).get_device_name(device))
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.machine() or "CPU")


def _memory(device: torch.device, ranks: int) -> int:
    if device.type != "cpu":
        properties = torch.get_device_module(device.type).get_device_properties(device)
        return int(properties.total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
