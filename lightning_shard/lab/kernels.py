"""Measures how fast a device runs the kernels that models use."""

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.lab.fake_modes import Real
from lightning_shard.lab.kernel_calls import (
    CONVOLUTIONS,
    KERNELS,
    Make,
    Move,
    copies,
    in_turns,
    product,
    transform,
)
from lightning_shard.lab.machine import Device, Rates
from lightning_shard.lab.timeline import Ledger
from lightning_shard.lab.trainer_loop import seconds_of_a_loop
from lightning_shard.processes.cpu_settings import tune_process

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REAL_OF_FFT = (torch.float32, torch.float64)
LARGEST = 2**13  # no larger extent is tried
BYTES = tuple(2**n for n in range(14, 28, 2))  # the smallest tensors lie in caches
LARGEST_MOVED = 2**9  # where the time goes by the bytes
KEPT = 2**24  # bytes
COPIED = 2**26  # bytes between a device and its host
LAYERS, LAYER_CHANNELS = 4, 16  # a network whose kernels are small
WORKSPACE_EXTENT = 256  # rows and columns of the convolution whose workspace is measured
_ENDLESS = 1e30
_ONE_A_KERNEL = Device("counter", 0, {"float32": _ENDLESS}, _ENDLESS, 1.0, "a second a kernel")


def measured_device(device: torch.device, ranks: int, seconds: float) -> Device:
    """Measure the device of this rank; the other ranks of the machine do so at the same time.

    Args:
        device: The device of this rank.
        ranks: The number of ranks that share the memory of this machine, if they use its CPU.
        seconds: The length of each kernel that decides a rate; shorter ones are less exact.
    """
    if device.type == "cpu":
        tune_process(ranks)  # as a run does
    workspace = _workspace(device)
    bandwidths = [_bandwidth(device, size, seconds) for size in BYTES]
    per_call = _per_call(device, seconds)
    return Device(
        name=name_of(device),
        memory=_memory(device, ranks),
        flops=_products(device, seconds),
        bandwidth=bandwidths[-1][1],
        per_call=per_call,
        source=f"measured with torch {torch.__version__}, threads {torch.get_num_threads()}",
        kernels={name: _rates(make, device, seconds) for name, make in KERNELS.items()},
        bandwidths=bandwidths,
        is_beside_host=device.type != "cpu",
        per_operator=_per_operator(device, per_call, seconds),
        per_step=seconds_of_a_loop(),
        **_host_rates(device, seconds),
        workspaces=_workspaces(device),
        workspace=workspace,
    )


def _rates(make: Make, device: torch.device, seconds: float) -> Rates:
    dtypes = REAL_OF_FFT if make is transform else DTYPES
    found = {str(dtype).removeprefix("torch."): _rate(make, device, dtype, seconds)
             for dtype in dtypes}  # fmt: skip
    return {name: rate for name, rate in found.items() if rate}


def _rate(make: Make, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Operations a second of the first size that takes as long; 0 where there is no such kernel.

    On a CPU the memory of no result is larger than what glibc keeps, or clearing it would take
    longer than a kernel.
    """
    extent, known = 32, 0
    largest = LARGEST_MOVED if isinstance(getattr(make, "__self__", None), Move) else LARGEST
    while extent <= largest:
        try:
            call, flops = make(device, dtype, extent)
            if known and device.type == "cpu" and _bytes(call()) > KEPT:
                break
            spent = seconds_of(call, device, 0.0)
        except (RuntimeError, NotImplementedError):  # no such kernel, or no memory for it
            break
        if spent >= seconds:
            return flops / spent
        known = extent
        extent *= 2 if device.type == "cpu" else 4  # libraries of a GPU plan each convolution
    if not known:
        return 0.0
    call, flops = make(device, dtype, known)
    return flops / seconds_of(call, device, seconds)


def _bytes(made: Any) -> int:
    first = made if isinstance(made, Tensor) else made[0]
    return 0 if first is None else first.nbytes


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


def _per_operator(device: torch.device, per_call: float, seconds: float) -> float:
    """Measure what the host takes for each operator of a step of a network whose kernels are small.

    On a CPU, without the time of the kernels themselves.
    """
    step = small_step(device)
    ledger = Ledger(_ONE_A_KERNEL)
    with Real(ledger):
        step()
    spent = seconds_of(step, device, seconds) / ledger.seconds
    return spent if device.type != "cpu" else max(0.0, spent - per_call)


def small_step(device: torch.device) -> Callable[[], None]:
    """Return a step of a network whose kernels are small; it has run once."""
    with device:
        net = nn.Sequential(*[part for _ in range(LAYERS) for part in _layer()])
        x = torch.ones(2, LAYER_CHANNELS, LAYER_CHANNELS, device=device)

    def step() -> None:
        net(x).square().mean().backward()

    step()
    return step


def _layer() -> tuple[nn.Module, ...]:
    """Return a convolution, a norm and a product, as networks have them."""
    width = LAYER_CHANNELS
    product, convolution = nn.Linear(width, width), nn.Conv1d(width, width, 3, padding=1)
    return convolution, nn.GroupNorm(2, width), nn.GELU(), product, nn.LayerNorm(width)


def _workspace(device: torch.device) -> int:
    """Measure the bytes that products keep after the first one, forward and backward."""
    if device.type == "cpu":
        return 0
    x = torch.ones(8, 8, device=device, requires_grad=True)
    before = _held(device)
    (x @ x).sum().backward()
    x.grad = None
    return max(0, _held(device) - before)


def _workspaces(device: torch.device) -> Rates:
    """Measure what convolutions take, for each byte of their input and result."""
    found: Rates = {}
    for dtype in DTYPES if device.type != "cpu" else ():
        call, _ = CONVOLUTIONS[""].forward(device, dtype, WORKSPACE_EXTENT)
        call()  # the first one tries several kernels
        before = _held(device)
        torch.get_device_module(device.type).reset_peak_memory_stats()
        result = call()
        peak = torch.get_device_module(device.type).max_memory_allocated()
        moved = 2 * result.nbytes  # the input is as large
        found[str(dtype).removeprefix("torch.")] = max(0, peak - before - result.nbytes) / moved
    return found


def _host_rates(device: torch.device, seconds: float) -> dict[str, float]:
    """Measure the bytes a second between a device and memory of the host, pinned and not.

    Of pinned memory the slower way counts. A CPU is its own host.
    """
    if device.type == "cpu":
        return {}
    there = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    paged = torch.zeros(COPIED, dtype=torch.uint8, device="cpu")
    pinned = paged.pin_memory()
    copies = [
        partial(to.copy_, source, non_blocking=True)
        for to, source in ((pinned, there), (there, pinned), (there, paged))
    ]
    out, back, plain = (COPIED / seconds_of(call, device, seconds) for call in copies)
    return {"host_rate": min(out, back), "batch_rate": plain}


def _held(device: torch.device) -> int:
    wait_for(device)
    return int(torch.get_device_module(device.type).memory_allocated())


def _bandwidth(device: torch.device, size: int, seconds: float) -> tuple[int, float]:
    """Return the bytes that a kernel moves, and bytes a second, with new memory for its result."""
    call = in_turns([partial(x.add, 1) for x in copies(torch.zeros(size // 4, device=device))])
    return 2 * size, 2 * size / seconds_of(call, device, seconds)


def _products(device: torch.device, seconds: float) -> Rates:
    """Rates of products; of those that TF32 shortens, too, on a device that may have it."""
    found = _rates(product, device, seconds)
    if device.type != "cpu":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            found["tf32"] = _rate(product, device, torch.float32, seconds)
        finally:
            torch.set_float32_matmul_precision(before)
    return found


def name_of(device: torch.device) -> str:
    """Return the name of a device, as its driver or Linux tells it."""
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
