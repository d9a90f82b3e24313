"""Lists the kernels that `calibrate` measures: products, convolutions, attention, norms and others.

`kernel_costs.py` says which of them an operator of a step is.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.processes.torch_private.typed import fft

FEW, MANY, WIDE = 3, 32, 256  # channels
HEADS, HEAD_WIDTH = 4, 32
GROUPS = 8
COLD, MOST_COPIES = 2**27, 64  # bytes
Made = tuple[Callable[[], Any], float]  # a call, and the operations of it, or its bytes
Make = Callable[[torch.device, torch.dtype, int], Made]
_convolution_backward: Any = torch.ops.aten.convolution_backward


def product(device: torch.device, dtype: torch.dtype, extent: int) -> Made:
    """Return the product of two square matrices."""
    x = torch.ones(extent, extent, device=device, dtype=dtype)
    return lambda: x @ x, 2.0 * extent**3


def transform(device: torch.device, dtype: torch.dtype, extent: int) -> Made:
    """Return Fourier transforms of square fields."""
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
        groups: Groups of channels.
        last: True if channels lie side by side in memory.
    """

    given: int = MANY
    made: int = MANY
    kernel: int = 3
    stride: int = 1
    groups: int = 1
    last: bool = False

    def forward(self, device: torch.device, dtype: torch.dtype, extent: int) -> Made:
        """Make the call, and count its operations."""
        x, weight = self._tensors(device, dtype, extent)
        rows = -(-extent // self.stride)
        flops = 2.0 * weight.numel() * rows**2
        padding, ones = self.kernel // 2, 1
        options = self.stride, padding, ones, self.groups
        return lambda: F.conv2d(x, weight, None, *options), flops

    def backward(
        self, device: torch.device, dtype: torch.dtype, extent: int, *, of_input: bool = True
    ) -> Made:
        """Make the call of both gradients, or of that of the weight; count its operations."""
        x, weight = self._tensors(device, dtype, extent)
        call, flops = self.forward(device, dtype, extent)
        y, padding, stride = call(), [self.kernel // 2] * 2, [self.stride] * 2
        wanted = [of_input, True, False]
        numbers = (stride, padding, [1, 1], False, [0, 0], self.groups, wanted)
        flops *= 2 if of_input else 1
        return lambda: _convolution_backward(y, x, weight, None, *numbers), flops

    def of_weight(self, device: torch.device, dtype: torch.dtype, extent: int) -> Made:
        """Make the call of the weight's gradient, and count its operations."""
        return self.backward(device, dtype, extent, of_input=False)

    def _tensors(
        self, device: torch.device, dtype: torch.dtype, extent: int
    ) -> tuple[Tensor, Tensor]:
        stored = torch.channels_last if self.last else torch.contiguous_format
        x = torch.ones(1, self.given, extent, extent, device=device, dtype=dtype)
        shape = self.made, self.given // self.groups, *[self.kernel] * 2
        weight = torch.ones(shape, device=device, dtype=dtype)
        return x.to(memory_format=stored), weight.to(memory_format=stored)


CONVOLUTIONS = {
    "": _Convolution(), "wide_": _Convolution(given=WIDE, made=WIDE),
    "thin_": _Convolution(given=FEW),
    "thin_strided_": _Convolution(given=FEW, made=2 * MANY, kernel=7, stride=2),
    "grouped_": _Convolution(given=2 * MANY, made=2 * MANY, kernel=7, groups=2 * MANY),
    "pointwise_": _Convolution(given=2 * MANY, made=2 * MANY, kernel=1),
    "wide_pointwise_": _Convolution(given=WIDE, made=WIDE, kernel=1),
    "last_": _Convolution(last=True),
}  # fmt: skip


def _attention(device: torch.device, dtype: torch.dtype, extent: int) -> tuple[Tensor, Tensor]:
    shape = 1, HEADS, 4 * extent, HEAD_WIDTH
    x = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
    return x, F.scaled_dot_product_attention(x, x, x)


def attention(device: torch.device, dtype: torch.dtype, extent: int) -> Made:
    """Return attention over 4 `extent` tokens."""
    x, _ = _attention(device, dtype, extent)
    return lambda: F.scaled_dot_product_attention(x, x, x), 4.0 * x.numel() * x.shape[2]


def attention_backward(device: torch.device, dtype: torch.dtype, extent: int) -> Made:
    """Return the gradient of attention, of five products where forward has two."""
    x, y = _attention(device, dtype, extent)
    return _gradient(x, y), 10.0 * x.numel() * x.shape[2]


def copies(x: Tensor) -> list[Tensor]:
    """Return as many copies as no cache holds; a step seldom finds in one what it computed."""
    count = min(MOST_COPIES, max(1, COLD // max(1, x.nbytes)))
    return [x.detach().clone().requires_grad_(x.requires_grad) for _ in range(count)]


def in_turns(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a call that makes one of the calls after the other."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def _gradient(x: Tensor, y: Tensor) -> Callable[[], Any]:
    ones = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, x, ones, retain_graph=True)


# functions that compute little for each byte, but at other rates than an addition
_MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, GROUPS),
    "layer_norm": lambda x: F.layer_norm(x.view(-1, 4 * MANY), (4 * MANY,)),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "upsample": lambda x: F.interpolate(x, scale_factor=2),
    "gelu": F.gelu,
    "relu": F.relu,
    "softmax": lambda x: F.softmax(x, -1),
    "sum": lambda x: x.sum((2, 3)),
    "to_copy": lambda x: x.to(torch.bfloat16 if x.dtype != torch.bfloat16 else torch.float32),
}


@dataclass(frozen=True)
class Move:
    """A function whose time goes by its bytes."""

    function: Callable[[Tensor], Tensor]

    def forward(self, device: torch.device, dtype: torch.dtype, extent: int) -> Made:
        """Make the call, and count the bytes that it reads and writes."""
        x, y = self._tensors(device, dtype, extent)
        calls = [partial(self.function, each) for each in copies(x)]
        return in_turns(calls), float(x.nbytes + y.nbytes)

    def backward(self, device: torch.device, dtype: torch.dtype, extent: int) -> Made:
        """Make the call of the gradient, and count the bytes: of both gradients and the input."""
        x, y = self._tensors(device, dtype, extent)
        calls = [_gradient(each, self.function(each)) for each in copies(x)]
        return in_turns(calls), float(2 * x.nbytes + y.nbytes)

    def _tensors(
        self, device: torch.device, dtype: torch.dtype, extent: int
    ) -> tuple[Tensor, Tensor]:
        shape = 1, MANY, extent, extent
        x = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
        return x, self.function(x)


MOVES = {name: Move(function) for name, function in _MOVES.items()}
KERNELS: dict[str, Make] = {
    **{f"{kind}convolution": each.forward for kind, each in CONVOLUTIONS.items()},
    **{f"{kind}convolution_backward": each.backward for kind, each in CONVOLUTIONS.items()},
    **{f"{kind}convolution_weight": CONVOLUTIONS[kind].of_weight
       for kind in ("", "thin_", "thin_strided_")},
    "attention": attention,
    "attention_backward": attention_backward,
    "fft": transform,
    **{name: each.forward for name, each in MOVES.items()},
    **{f"{name}_backward": each.backward for name, each in MOVES.items()},
}  # fmt: skip
