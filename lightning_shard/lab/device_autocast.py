"""Traces mixed precision as a GPU computes it, on tensors that lie on the CPU.

Autocast runs some functions in float32 on a GPU, and others on a CPU
(https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). A norm of a bfloat16 field is
the most important: its result is in float32 on a GPU, so it holds twice the memory.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from lightning_shard.domain.half import wide
from lightning_shard.ops.autocast import forget_types
from lightning_shard.processes.torch_private.internals import schema_of, tree_map_only

# on a GPU in float32, on a CPU in the type of their operands
_IN_FLOAT32 = (
    "acos", "asin", "cosh", "cosine_similarity", "cumprod", "cumsum", "dist", "erfinv", "exp",
    "expm1", "group_norm", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "norm",
    "pow", "reciprocal", "renorm", "rsqrt", "sinh", "softmax", "softplus", "sum", "tan",
)  # fmt: skip
# on a CPU in float32, on a GPU in the type of their operands
_AS_GIVEN = (
    "adaptive_avg_pool3d", "avg_pool3d", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d",
    "max_pool3d", "max_unpool2d", "max_unpool3d", "reflection_pad1d", "reflection_pad2d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "trace",
)  # fmt: skip


@contextmanager
def autocast_of_gpu() -> Generator[None]:
    """Let autocast give functions the types that they have on a GPU, in this process, while open.

    Torch forgets the functions as the library that holds them goes.
    """
    library = Library("aten", "IMPL", "AutocastCPU")
    for name in _IN_FLOAT32:
        for operator in _functions(name):
            library.impl(operator.name(), _in_float32(operator))
    for name in _AS_GIVEN:
        for operator in _functions(name):
            library.impl(operator.name(), fallthrough_kernel)
    forget_types()
    try:
        yield
    finally:
        del library
        forget_types()


def _functions(name: str) -> list[Any]:
    """Return the forms of an operator that write none of their arguments."""
    packet: Any = getattr(torch.ops.aten, name)
    found = [getattr(packet, form) for form in packet.overloads()]
    return [each for each in found if not schema_of(each).is_mutable]


def _in_float32(operator: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, wide, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            return operator(*args, **kwargs)

    return call
