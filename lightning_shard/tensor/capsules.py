"""Refuses the capsules of DLPack that C++ makes of any tensor.

`to_dlpack` asks no rule. A split tensor is a wrapper without memory, so its capsule would point
nowhere, and whoever reads it ends by a segmentation fault. `x.__dlpack__()` has a rule of its own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack as dlpack

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.processes.torch_private.internals import replace_internal
from lightning_shard.tensor.tensor import DomainTensor


@functools.cache
def install_capsules() -> None:
    """Let `to_dlpack` look at its tensor; called when the first split tensor is made."""
    for name in ("torch._C._to_dlpack", "torch._C._to_dlpack_versioned"):
        replace_internal(name, _refusing)
    dlpack.__dict__["to_dlpack"] = torch.__dict__["to_dlpack"] = _refusing(torch.to_dlpack)


def _refusing(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what makes a capsule: a split tensor has none."""

    @functools.wraps(make)
    def to_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, DomainTensor):
            raise UnsupportedOperationError(
                "cannot run to_dlpack on a tensor split over ranks: the values lie on several "
                "ranks; take lightning_shard.gather(tensor)"
            )
        return make(tensor, *args, **kwargs)

    return to_dlpack
