"""Tells what an operator's kernel takes on a device: seconds, and memory beside its tensors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_shard.domain.memory_format import format_of
from lightning_shard.lab.machine import Device

NO_KERNEL = ("empty", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift_fresh")
THIN, WIDE = 8, 96  # channels, on either side of a convolution: its kernels are slower, or quicker
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_FFT_FLOPS = 5  # times n log2(n), for n complex numbers
# the beginnings of operators' names, by the name of the function that is measured
_MOVES = {
    "batch_norm": ("native_batch_norm", "_native_batch_norm"),
    "group_norm": ("native_group_norm",),
    "layer_norm": ("native_layer_norm",),
    "max_pool": ("max_pool",),
    "upsample": ("upsample",),
    "gelu": ("gelu", "silu", "mish", "elu", "tanh", "sigmoid", "exp", "erf", "sin", "cos"),
    "relu": ("relu", "threshold", "leaky_relu", "hardswish", "hardtanh", "hardsigmoid"),
    "softmax": ("_softmax", "_log_softmax"),
    "sum": ("sum", "mean"),
    "to_copy": ("_to_copy", "copy"),
}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True)
class Call:
    """An operator with its arguments and its result.

    Attributes:
        operator: The operator of torch.ops.
        args: Its arguments.
        kwargs: Its arguments by name.
        out: Its result.
        used: The tensors that it reads and writes.
    """

    operator: Any
    args: Any
    kwargs: Any
    out: Any
    used: list[Tensor]

    @property
    def name(self) -> str:
        """The name of the operator without its overload."""
        return self.operator.overloadpacket.__name__

    @property
    def is_product(self) -> bool:
        """Return whether it is a product of matrices."""
        return self.name in _PRODUCTS

    @property
    def convolution(self) -> tuple[Tensor, Tensor, Tensor, Any] | None:
        """Input, weight, result (or its gradient) and stride, if it is a convolution."""
        if self.name == "convolution":
            return self.args[0], self.args[1], self.out, self.args[3]
        if self.name == "convolution_backward":
            return self.args[1], self.args[2], self.args[0], self.args[4]
        return None


@dataclass(frozen=True)
class KernelCost:
    """Holds the time and the memory of a kernel.

    Attributes:
        seconds: Its time on the device.
        workspace: The bytes that it takes beside its tensors, while it runs.
    """

    seconds: float
    workspace: int = 0


class Costs(Protocol):
    """Tells what kernels take."""

    def begin_step(self) -> None:
        """Note that a step begins."""
        ...

    def cost(self, call: Call, memory_of: Callable[[Tensor], Any]) -> KernelCost:
        """Return what a kernel takes; `memory_of` gives an object for the memory of a tensor."""
        ...


@dataclass(frozen=True)
class ByRates:
    """Kernels that take what the rates of a device say."""

    device: Device

    def begin_step(self) -> None:
        """Steps do not differ."""

    def cost(self, call: Call, memory_of: Callable[[Tensor], Any]) -> KernelCost:
        """Return what a kernel takes."""
        return KernelCost(seconds_on(self.device, call), workspace_on(self.device, call))


def seconds_on(device: Device, call: Call) -> float:
    """Return the seconds in which a device computes the kernel of an operator."""
    dtype = max(call.used, key=_bytes).dtype
    moved = sum(map(_bytes, call.used))
    kind = str(_REAL.get(dtype, dtype)).removeprefix("torch.")
    flops = _flops(call)
    kernels = _kernels(call)
    if flops:
        if kind == "float32" and not kernels and torch.get_float32_matmul_precision() != "highest":
            kind = "tf32"
        return max(
            moved / device.bandwidth_of(moved), flops / device.flops_of(kernels, kind),
            device.per_call,
        )  # fmt: skip
    rate = device.kernels.get(_move(call.name), {}).get(kind) or device.bandwidth_of(moved)
    return max(moved / min(rate, device.bandwidth_of(moved)), device.per_call)


def _move(name: str) -> str:
    """Name a kernel whose time goes by its bytes as `kernel_calls.py` does; "" if it does not."""
    way = "_backward" if "backward" in name else ""
    for measured, names in _MOVES.items():
        if name.startswith(names):
            return measured + way
    return ""


def workspace_on(device: Device, call: Call) -> int:
    """Return the bytes that a kernel takes beside its tensors, while it runs.

    cuDNN writes the input and the result of a convolution anew, with the channels side by side. A
    kernel of one place is a product of matrices, which needs none.
    """
    if (found := call.convolution) is None or format_of(found[0]) != torch.contiguous_format:
        return 0
    x, weight, y, _ = found
    if weight.shape[2:].numel() == 1:
        return 0
    share = device.workspaces.get(str(x.dtype).removeprefix("torch."), 0.0)
    return int(share * (_bytes(x) + _bytes(y)))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _kernels(call: Call) -> list[str]:
    """Name the kinds of kernel of an operator as `Device.kernels` does, the closest one first."""
    if call.name.startswith("_fft_"):
        return ["fft"]
    if call.name.startswith("_scaled_dot_product"):
        return ["attention_backward" if "backward" in call.name else "attention"]
    if (found := call.convolution) is None:
        return []
    kind, way = _kind_of_convolution(*found), call.name
    if way == "convolution_backward" and not call.args[-1][0]:  # the input needs no gradient
        return [f"{kind}convolution_weight", f"{kind}{way}", way]
    return [f"{kind}{way}", f"{kind.removeprefix('wide_')}{way}", way]


def _kind_of_convolution(x: Tensor, weight: Tensor, y: Tensor, stride: Any) -> str:
    if weight.shape[1] < min(x.shape[1], y.shape[1]):
        return "grouped_"
    if min(weight.shape[:2]) < THIN:
        # a stem is nearer to a convolution of many channels than to a thin one without strides:
        # 43, 68 and 8 of 10^9 operations a second on one core of an AMD EPYC
        return "thin_strided_" if max(stride) > 1 else "thin_"
    wide = "wide_" if min(weight.shape[:2]) >= WIDE else ""
    if weight.shape[2:].numel() == 1:
        return f"{wide}pointwise_"
    return "last_" if format_of(x) != torch.contiguous_format else wide


def _flops(call: Call) -> float:
    if (found := call.convolution) is not None:
        x, weight, y, _ = found
        is_transposed = weight.shape[0] == x.shape[1] != y.shape[1]
        places = (x if is_transposed else y).shape[2:].numel()
        wanted = 1 if call.name == "convolution" else sum(call.args[-1][:2])
        return 2.0 * wanted * len(x) * weight.numel() * places  # torch's is not of groups
    packet: Any = call.operator.overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*call.args, **call.kwargs, out_val=call.out)
    if call.name.startswith("_fft_"):
        given, dims = call.args[0], call.args[1]
        numbers = max(given.numel(), call.out.numel())
        extent = math.prod(max(given.shape[d], call.out.shape[d]) for d in dims)
        return _FFT_FLOPS * numbers * math.log2(max(2, extent))
    return 0.0
