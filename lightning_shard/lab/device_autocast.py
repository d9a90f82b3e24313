"""Traces mixed precision as a GPU computes it, on tensors that lie on the CPU.

Autocast runs some functions in float32 on a GPU, and others on a CPU
(https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). A norm of a bfloat16 field is
the most important: its result is in float32 on a GPU, so it holds twice the memory.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_shard.processes.torch_private.internals import tree_map_only

_HALF = (torch.float16, torch.bfloat16)
# on a GPU in float32, on a CPU in the type of their operands
_IN_FLOAT32 = frozenset({
    "acos", "asin", "cosh", "cosine_similarity", "cumprod", "cumsum", "dist", "erfinv", "exp",
    "expm1", "group_norm", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "norm",
    "normalize", "pow", "__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "reciprocal", "renorm",
    "rsqrt", "sinh", "softmax", "softmin", "softplus", "sum", "tan",
})  # fmt: skip
# on a CPU in float32, on a GPU in the type of their operands
_AS_GIVEN = frozenset({
    "adaptive_avg_pool3d", "avg_pool3d", "grid_sample", "max_pool3d", "max_unpool2d",
    "max_unpool3d", "pad", "trace",
})  # fmt: skip


class AutocastOfGPU(TorchFunctionMode):
    """Gives functions the types in which autocast runs them on a GPU, while open."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, in another type if a GPU would do so."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not torch.is_autocast_enabled("cpu") or name not in _IN_FLOAT32 | _AS_GIVEN:
            return func(*args, **kwargs)
        if name in _IN_FLOAT32:
            args, kwargs = tree_map_only(Tensor, _in_float32, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)


def _in_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _HALF else x
