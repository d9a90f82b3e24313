"""Puts one block under FSDP2: its group of parameters, and hooks for split tensors.

Parameters of a group must have one dtype; those of another one stay whole (plain_gradients.py).
"""

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_shard.data.tree import map_leaves
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.fsdp.blocks import can_be_gathered
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.processes.device import device_of
from lightning_shard.processes.torch_private.internals import (
    gathered_by,
    is_view,
    module_of,
    own_parameters,
)
from lightning_shard.tensor.placement import pack, unpack
from lightning_shard.tensor.tensor import DomainTensor

SHOWS_WHOLE = ContextVar("SHOWS_WHOLE", default=False)  # True within `whole_parameters`


def shard_block(
    block: nn.Module,
    mesh: DeviceMesh,
    options: ShardingOptions,
    ignored: set[nn.Parameter] | None = None,
) -> FSDPModule:
    """Let FSDP2 shard the parameters under `block` that no block inside it has.

    Args:
        block: A module on the mesh's device, or on the meta device.
        mesh: One axis that shards, or one that replicates and one that shards.
        options: The options of the user.
        ignored: Parameters that stay as they are.
    """
    policy = options.policy
    if policy.param_dtype is not None and (pairs := _own_pairs(block)):
        # there are no complex numbers of 16 bits that FFTs take
        output = policy.output_dtype or policy.param_dtype
        policy = replace(policy, param_dtype=pairs[0].dtype, output_dtype=output)
    offload = OffloadPolicy()
    if options.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    with _fsdp_sees_local_tensors(block):
        sharded = fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=False if options.mode == "gradients" else None,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=ignored or set(),
        )
    # a sum that is divided is right everywhere: FSDP2 would ask for averages, or pre-multiplied
    # sums, which oneCCL lacks between nodes (https://github.com/uxlfoundation/oneCCL/issues/195)
    if not device_of(mesh.device_type).averages:
        sharded.set_force_sum_reduction_for_comms(True)
    return sharded


def class_name(module: nn.Module) -> str:
    """Return the name that the user gave the class, before FSDP2 mixed in its own."""
    return type(module).__name__.removeprefix("FSDP")


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """Return the modules under `root`, itself included, whose parameters FSDP2 gathers."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def of_other_dtypes(blocks: Sequence[nn.Module], taken: set[nn.Parameter]) -> set[nn.Parameter]:
    """Parameters that cannot be in the group of their block, because most of it has another dtype.

    Args:
        blocks: The modules to be sharded, inner ones first.
        taken: Parameters that are in no group.
    """
    seen, others = set(taken), set[nn.Parameter]()
    for block in blocks:
        group = [p for p in block.parameters() if p not in seen]
        seen.update(group)
        numbers = Counter[torch.dtype]()
        for p in group:
            numbers[p.dtype] += p.numel()
        if len(numbers) > 1:
            usual = numbers.most_common(1)[0][0]
            others.update(p for p in group if p.dtype != usual)
    return others


def prefetch(root: nn.Module, number: int) -> None:
    """Gather `number` blocks ahead of the one that runs, in the order of `root.modules()`.

    With 1, FSDP2's own order is left: the next block in forward, the one before it in backward.
    """
    if number == 1:
        return
    order = [module for module in sharded_modules(root) if module is not root]
    for i, block in enumerate(order):
        block.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + number])
        block.set_modules_to_backward_prefetch(order[max(i - number, 0) : i][::-1])


def with_complex_parameters(root: nn.Module) -> list[nn.Module]:
    """Modules under `root` that hold complex parameters, as pairs, themselves or in a factor."""
    return [m for m in reversed(list(root.modules())) if m is not root and _reads_pairs(m)]


def _reads_pairs(module: nn.Module) -> bool:
    parts = [module, *(c for c in module.children() if not can_be_gathered(c))]
    return can_be_gathered(module) and any(part.__dict__.get("_pairs") for part in parts)


def _own_pairs(block: nn.Module) -> list[nn.Parameter]:
    """Return the parameters stored as pairs in `block`, outside of inner blocks."""
    parts = [block]
    for part in parts:
        parts.extend(c for c in part.children() if not isinstance(c, FSDPModule))
    held = [
        own_parameters(part)[name] for part in parts for name in part.__dict__.get("_pairs", ())
    ]
    return [p for p in held if p is not None]


class LocalTensors:
    """Shows containers of split tensors to FSDP2's hooks as one tuple of local tensors."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self._waiting: list[tuple[Any, tuple[Any, ...], list[Any]]] = []

    def strip(self, value: Any) -> tuple[Any, ...]:
        """Return the leaves of `value`, split tensors as local ones."""
        shown, layouts = list[Any](), list[Any]()

        def show(leaf: Any) -> Any:
            local, layout = unpack(leaf) if isinstance(leaf, DomainTensor) else (leaf, None)
            shown.append(local)
            layouts.append(layout)
            return leaf

        self._waiting.append((map_leaves(show, value), tuple(shown), layouts))
        return tuple(shown)

    def restore(self, shown: Any) -> Any:
        """Return what was stripped last, with the leaves that are given now.

        A leaf that FSDP2 has left alone is the same object again, and so are its containers: a
        program may return its batch, and write into what it has returned.
        """
        value, before, layouts = self._waiting.pop()
        parts = zip(before, shown, layouts, strict=True)

        def whole(leaf: Any) -> Any:
            old, new, layout = next(parts)
            if new is old and not (isinstance(new, Tensor) and new.requires_grad):
                return leaf
            return new if layout is None else pack(new, layout)

        return map_leaves(whole, value)


@contextmanager
def _fsdp_sees_local_tensors(block: nn.Module) -> Generator[None]:
    """The hooks that FSDP2 gives to `block` while this is open see local tensors, in one tuple.

    They apply autograd functions to a block's inputs and outputs, make records anew, or, in torch
    2.11, do not look into them. What they see is set up right before them and undone right after:
    the block and all its other hooks see split tensors.
    """
    local = LocalTensors()

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_forward_mode() and torch.is_grad_enabled() and not SHOWS_WHOLE.get():
            raise UnsupportedOperationError(
                f"{class_name(block)}, whose parameters are sharded, ran in forward mode, as by "
                "torch.func.jvp; FSDP2 would not reduce the gradients of a loss of tangents: keep "
                "parameters whole with sharding='none', or take no gradients (torch.no_grad())"
            )
        refuse_other_tensors(block)
        if torch.is_inference_mode_enabled():  # tensors that FSDP2 made in it could not be trained
            with torch.inference_mode(False):
                cast("FSDPModule", block).unshard()
        return local.strip((args, kwargs)), {}

    # FSDP's hooks come first before the call, and last after it
    block.register_forward_pre_hook(
        lambda _, args, __: local.restore(args), prepend=True, with_kwargs=True
    )
    block.register_forward_hook(lambda _, __, output: local.strip(no_views(output)))
    yield
    block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    block.register_forward_hook(lambda _, __, output: local.restore(output))


def refuse_other_tensors(block: Any) -> None:
    """Refuse to gather a block that `torch.func.functional_call` has given other parameters.

    FSDP2 would put its own in their place, so the block would run as if nobody had given any.

    Raises:
        UnsupportedOperationError: A parameter of the block is no shard.
    """
    for record in gathered_by(block):
        place = module_of(record)
        held = own_parameters(place.module).get(place.param_name)
        is_own = held is None or (isinstance(held, nn.Parameter) and isinstance(held, DTensor))
        if record.sharded_state.name == "SHARDED" and not is_own:
            raise UnsupportedOperationError(
                f"torch.func.functional_call gave {class_name(place.module)} another tensor as "
                f"its {place.param_name}, which FSDP2 would replace by the sharded parameter: keep "
                "parameters whole with sharding='none', or call functional_call on a module "
                "outside of the blocks that `wrap` names"
            )


def no_views(output: Any) -> Any:
    """FSDP2 loses its hook on an output that is a view, if something is then written into it."""

    def owned(value: Any) -> Any:
        if isinstance(value, DomainTensor):
            local, part = unpack(value)
            return pack(local.clone(), part) if local.requires_grad and is_view(local) else value
        view = type(value) is Tensor and value.requires_grad and is_view(value)
        return value.clone() if view else value

    return map_leaves(owned, output)
