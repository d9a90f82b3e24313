"""Forward-mode derivatives: a rank's part may be a dual tensor, of values and their tangent.

torch's own functions carry tangents. A collective is linear, so it sends the tangent as it sent the
values. All ranks must call it alike, also one without rows, whose tangent may have been lost: so in
forward mode each tensor that travels gets a tangent, of zeros if it has none.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.processes.torch_private.internals import (
    carries_tangents,
    dual_level,
    forward_ad,
)


def in_forward_mode() -> bool:
    """Return True inside of a `dual_level`, where functions carry tangents."""
    return dual_level() >= 0 and carries_tangents()


def ranks_are_threads() -> bool:
    """Return True on simulated ranks, which share the one level of dual tensors of a process."""
    return dist.is_initialized() and dist.get_backend() == "threaded"


def with_tangent(x: Tensor) -> Tensor:
    """Return `x`; in forward mode with a tangent of zeros, if it has none."""
    if not in_forward_mode() or not (x.is_floating_point() or x.is_complex()):
        return x
    if forward_ad.unpack_dual(x).tangent is not None:
        return x
    return forward_ad.make_dual(x, torch.zeros_like(x))


def refuse_without_tangents() -> None:
    """Raise where a function is called in forward mode and its tangents would be lost.

    Raises:
        UnsupportedOperationError: It is called in the forward of an autograd.Function, or on
            simulated ranks, one of which would end the level of the others; or torch records it.
    """
    if dual_level() < 0:
        return
    if ranks_are_threads():
        raise UnsupportedOperationError(
            "in a dual_level of simulated ranks, which share one; call torch.func.jvp instead"
        )
    if _is_recorded():
        raise UnsupportedOperationError(
            "in forward mode while torch records a graph, which is of one rank, as "
            "torch.func.linearize does; call torch.func.jvp for each tangent instead"
        )
    if not carries_tangents():
        raise UnsupportedOperationError(
            "in forward mode, inside of an autograd.Function; give the Function plain tensors "
            "(lightning_shard.local_map), or write it in functions of torch"
        )


def _is_recorded() -> bool:
    """Return whether torch records a graph of what runs, as `make_fx` does."""
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")  # imported where it records
    return module is not None and module.get_proxy_mode() is not None


def refuse_tangent(x: Tensor) -> None:
    """Raise where memory that travels has a tangent, which would stay behind.

    Raises:
        UnsupportedOperationError: The tensor is dual, and its rule has no forward mode.
    """
    if not in_forward_mode() or not (x.is_floating_point() or x.is_complex()):
        return
    if forward_ad.unpack_dual(x).tangent is not None:
        raise UnsupportedOperationError(
            "it has no forward mode; take torch.autograd.functional.jvp, which differentiates "
            "backwards twice"
        )
