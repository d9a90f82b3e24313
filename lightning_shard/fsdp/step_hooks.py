"""Opens around the steps of a module, and around its blocks, what holds while they run."""

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lightning_shard.fsdp.no_sync import without_reduction
from lightning_shard.fsdp.plain_gradients import plain_gradients_of
from lightning_shard.fsdp.rank_barrier import wait_for_ranks
from lightning_shard.fsdp.same_blocks import members_come_to
from lightning_shard.fsdp.shard_block import (
    LocalTensors,
    class_name,
    no_views,
    refuse_other_tensors,
    sharded_modules,
)
from lightning_shard.fsdp.step_writes import (
    GATHERED,
    GatheredParameters,
    ReplacedParameters,
    refusing_writes,
)
from lightning_shard.fsdp.work import Work
from lightning_shard.ops.elementwise.whole_gradients import whole_gradients
from lightning_shard.processes.mesh import parameter_mesh
from lightning_shard.processes.replica_world import replica_world
from lightning_shard.processes.torch_private.internals import (
    backward_pass,
    gathered_by,
    own_parameters,
    tree_map_only,
)


def open_around_steps(work: Work) -> None:
    """Let the methods that run the module count domains once, and see whole gradients."""
    for name in work.methods:
        method = getattr(work.module, name)
        _put(work.module, name, _in_step(method, work), method)


def wrap_methods(work: Work) -> None:
    """Let the steps run with whole parameters, refuse writes into them, and count domains once."""
    module = work.module
    gathered = module.__dict__[GATHERED] = GatheredParameters(module)
    replaced = ReplacedParameters(module, work.plain)
    for name in work.methods:
        method = getattr(module, name)
        local = LocalTensors()
        setattr(module, name, _stripped(refusing_writes(method, gathered), local))
        register_fsdp_forward_method(module, name)  # wraps the attribute, so it is set before
        _put(module, name, _as_step(getattr(module, name), work, replaced, local), method)


def _put(module: nn.Module, name: str, step: Callable[..., Any], method: Any) -> None:
    """Put `step` in the place of a method, as a bound method: Fabric marks nothing else."""

    @functools.wraps(method)
    def bound(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    is_method = inspect.ismethod(method)
    put: Any = bound if is_method else functools.wraps(method)(lambda *a, **k: step(*a, **k))
    # Lightning looks behind one decorator for the arguments that a step takes
    plain = method.__func__ if is_method else method
    put.__dict__["__wrapped__"] = getattr(method, "__wrapped__", plain)
    setattr(module, name, MethodType(bound, module) if is_method else put)


def _stripped(method: Callable[..., Any], local: LocalTensors) -> Callable[..., Any]:
    """Return outputs as FSDP2's hooks want them: local, and no views, of which they warn."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = no_views(method(*args, **kwargs))
        tree_map_only(DTensor, _refuse_shard, output)
        return local.strip(output)

    return wrapped


def _refuse_shard(value: DTensor) -> DTensor:
    if value.requires_grad and not isinstance(value, nn.Parameter):
        raise RuntimeError(
            "the step returns a value that was computed from shards of parameters. In a step the "
            "parameters of a block are whole while the block runs only: sharding='none' keeps them "
            "whole always, sharding='gradients' until backward."
        )
    return value


def _in_step(method: Callable[..., Any], work: Work) -> Callable[..., Any]:
    """Open around a step what holds while it runs."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with (
            replica_world(work.mesh, work.axes),
            whole_gradients(work.split, comes_to=members_come_to),
        ):
            return method(*args, **kwargs)

    return wrapped


def _as_step(
    method: Callable[..., Any], work: Work, replaced: ReplacedParameters, local: LocalTensors
) -> Callable[..., Any]:
    """Open around a step, and so around FSDP2's hooks, what holds while it runs."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not work.running:
            replaced.take()
            work.module.__dict__[GATHERED].see_shards()
        gradients = whole_gradients(
            work.split, lambda: without_reduction(work.module), members_come_to
        )
        with work.running, replica_world(work.mesh, work.axes), gradients:
            output = local.restore(method(*args, **kwargs))
        if getattr(work.module, "automatic_optimization", True) is False:
            for block in sharded_modules(work.module):  # hooks know sharded parameters
                block.reshard()
        return output

    return wrapped


def count_domains_once(work: Work) -> None:
    """Let collectives of the module's own forward go over data replicas, see replica_world."""
    open_ones: list[Any] = []

    def enter(*_: Any) -> None:
        open_ones.append(replica_world(work.mesh, work.axes))
        open_ones[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ones.pop().__exit__(None, None, None)

    handles = [
        work.module.register_forward_pre_hook(enter, prepend=True),
        work.module.register_forward_hook(leave, always_call=True),
    ]
    if work.options.mode == "none" and (plain := plain_gradients_of(work.module)) is not None:
        plain.until_closed(*handles)


def meet_outside_of_steps(work: Work) -> None:
    """Let all ranks meet before a block gathers its parameters in a hook: one may be alone."""
    axes = parameter_mesh(work.mesh, work.options.mode)
    ranks = tuple(dist.get_process_group_ranks(axes.get_group(axes.ndim - 1)))
    if not work.methods or len(ranks) == 1:
        return  # a script runs the same on all ranks

    def enter(block: nn.Module, *_: Any) -> None:
        if not work.running and backward_pass() == -1 and _is_sharded(block):
            wait_for_ranks(
                ranks,
                "module",
                f"runs {class_name(block)} outside of the steps of the LightningModule",
                "all ranks must run it, since each holds a part of its parameters; draw or log "
                "the result on one rank, and leave the module out of rank_zero_only",
            )
        work.running.__enter__()

    def leave(*_: Any) -> None:
        work.running.__exit__(None, None, None)

    for block in sharded_modules(work.module):
        assert isinstance(block, nn.Module)
        block.register_forward_pre_hook(enter, prepend=True)
        block.register_forward_hook(leave, always_call=True)


def _is_sharded(block: Any) -> bool:
    """Return True if a call of the block would gather parameters."""
    return any(r.sharded_state.name == "SHARDED" for r in gathered_by(block))


def gather_for_parts_called_alone(work: Work) -> None:
    """Gather a block whose layers a step calls one by one, as for a perceptual loss of features.

    FSDP2 gathers as the block itself is called. Its parameters then stay whole until backward.
    Compiled blocks are left out: a hook of a layer would break their graph.
    """
    if work.options.compile_blocks:
        return

    def enter(block: Any, *_: Any) -> None:
        if work.running and backward_pass() == -1 and _is_sharded(block):
            refuse_other_tensors(block)
            block.unshard()

    blocks = {b for b in sharded_modules(work.module) if b is not work.module}
    for block in blocks:
        assert isinstance(block, nn.Module)
        parts = {*block.modules()} - {block}
        parts -= {m for inner in parts & blocks for m in inner.modules()}
        for part in parts:
            if any(p is not None for p in own_parameters(part).values()):
                part.register_forward_pre_hook(functools.partial(enter, block), prepend=True)
