"""Backward through tangents of blocks that FSDP2 shards.

FSDP2 gathers a block's parameters, and reduces their gradients, by hooks of its outputs and inputs.
A loss of tangents may reach none of them, and then gradients of parameters would stay partial. So
the tangents of outputs have the hooks, too. The hook of inputs, which is an autograd.Function
without a forward mode, is left out: gradients are then reduced where the backward pass ends.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.processes.torch_private.internals import (
    forward_ad,
    pre_backward_of,
    replace_internal,
    tree_leaves,
)
from lightning_shard.tensor.tensor import DomainTensor

Hook = Callable[..., Any]


def hook_tangents_of_blocks() -> None:
    """Let FSDP2 hear of backward passes that come through tangents."""
    where = "torch.distributed.fsdp._fully_shard."
    replace_internal(where + "_fsdp_state.FSDPState._register_pre_backward_hook", _of_outputs)
    replace_internal(
        where + "_fsdp_param_group.FSDPParamGroup._register_post_backward_hook", _of_inputs
    )


def _of_outputs(plain: Hook) -> Hook:
    def register(state: Any, output: Any) -> Any:
        output = plain(state, output)
        if in_forward_mode():
            for x in tree_leaves(output):
                if isinstance(x, Tensor) and (tangent := _tangent_of(x)) is not None:
                    tangent.register_hook(pre_backward_of(state))
        return output

    return register


def _tangent_of(x: Tensor) -> Tensor | None:
    """The tangent of a rank's part, if a backward pass may come through it."""
    local = x.to_local() if isinstance(x, DomainTensor) else x
    tangent = forward_ad.unpack_dual(local).tangent
    return tangent if tangent is not None and tangent.requires_grad else None


def _of_inputs(plain: Hook) -> Hook:
    def register(group: Any, args: Any, kwargs: Any) -> Any:
        return (args, kwargs) if in_forward_mode() else plain(group, args, kwargs)

    return register
