"""Hands out whole values of split tensors in hooks and evaluation: arrays, lists and pictures.

A logger draws what lies on all ranks. So `x.numpy()`, `x.tolist()` and what calls them gather
there, on all ranks of a domain. In training steps they are refused: an array has no gradient.
"""

import hashlib
import math
import sys
from collections import Counter

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.fsdp.meeting import meet

_EVALUATION = ("validation_step", "test_step", "predict_step")


class HookValues:
    """Lets hooks of one run read values, and counts the bytes that were gathered.

    Attributes:
        reads: The reads in each hook.
        gathered_bytes: The bytes that each rank has gathered in each hook.
    """

    def __init__(self, module: LightningModule) -> None:
        """Begin to count.

        Args:
            module: The module whose Trainer runs the hooks.
        """
        self._module = module
        self.reads: Counter[str] = Counter()
        self.gathered_bytes: Counter[str] = Counter()

    def __call__(self, x: Subdomain) -> bool:
        """Return True in a hook, once all ranks of the domain have come to read the tensor."""
        hook = str(getattr(self._module, "_current_fx_name", ""))  # as Lightning names a hook
        if not (hook.startswith("on_") or hook in _EVALUATION):
            return False
        axes = range(x.domain.mesh.ndim)
        ranks = tuple(dist.get_process_group_ranks(x.domain.group(tuple(axes))))
        meet(
            ranks,
            f"values {hook} {_callers()}",
            f"reads the values of a split tensor of shape {tuple(x.shape)} in {hook}, as numpy() "
            "does",
            "all ranks must read them, since each holds a part; draw or log the array on one "
            "rank, and leave numpy() out of rank_zero_only",
        )
        size = math.prod(x.shape) * x.local.dtype.itemsize
        if not self.reads[hook]:
            rank_zero_warn(
                f"{hook} reads the values of a split tensor, as numpy() does; it is gathered, "
                f"{size:,} bytes on every rank. The run's report counts all such bytes."
            )
        self.reads[hook] += 1
        self.gathered_bytes[hook] += size
        return True

    def __str__(self) -> str:
        return ", ".join(
            f"{hook}: {n} times, {self.gathered_bytes[hook]:,} bytes on every rank"
            for hook, n in self.reads.items()
        )


def _callers() -> str:
    """Return a number for the lines that call, which are the same on all ranks."""
    lines: list[tuple[str, int]] = []
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and not frame.f_code.co_name.startswith("_call_"):
        lines.append((frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:16]
