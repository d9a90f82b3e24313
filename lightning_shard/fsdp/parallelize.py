"""Shards the parameters of a network over all ranks of a mesh, by FSDP2.

Parameters know nothing of the domain: they are sharded over data x domain ranks alike, so their
memory falls with every rank. Each rank's gradient of the replicated loss is a partial one
(domain/comm.py), and the mean over all ranks, which FSDP2 takes by itself, is the gradient.
"""

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.fsdp.alike import refuse_other_modules
from lightning_shard.fsdp.blocks import blocks, named, tied_outside
from lightning_shard.fsdp.complex_pairs import pair_names, store_as_pairs
from lightning_shard.fsdp.gathered import Gathered, keeping_writes
from lightning_shard.fsdp.materialize import check_can_be_reset, materialize
from lightning_shard.fsdp.mixins import is_a
from lightning_shard.fsdp.neuralop.layers import avoid_whole_fields
from lightning_shard.fsdp.neuralop.split_weights import show_split_weights, split_by_mode
from lightning_shard.fsdp.numbers import read_whole_numbers
from lightning_shard.fsdp.offload import offload
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.fsdp.plain_gradients import average_plain_gradients
from lightning_shard.fsdp.recompute import compile_forward, keep_no_cache, recompute
from lightning_shard.fsdp.shard_block import (
    no_views,
    of_other_dtypes,
    prefetch,
    shard_block,
    with_complex_parameters,
)
from lightning_shard.processes.errors_together import copy_from_first
from lightning_shard.processes.mesh import domain_mesh, flat_mesh, parameter_mesh, replica_mesh
from lightning_shard.processes.replica_world import replica_world
from lightning_shard.processes.torch_private.internals import has_hooks

Moved = dict[nn.Parameter, nn.Parameter]

_SHARDED_OVER = "_sharded_over"  # attribute of a module: its mesh


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    methods: Sequence[str] = (),
    dims: Sequence[int] | None = None,
    options: ShardingOptions = ShardingOptions(),  # noqa: B008 - it is frozen
    loaded: Sequence[str] = (),
    domain: str | Sequence[str] = (),
) -> Moved:
    """Shard `module`'s parameters over all ranks of `mesh`, in place; its classes stay theirs.

    Weights and buffers of the first rank go to all ranks. After `loss.backward()` of a loss that is
    the same on all ranks of a domain, each parameter's `.grad` holds this rank's shard of the
    gradient of the mean loss over data ranks: nothing is left to all-reduce.

    Args:
        module: An ordinary module on the mesh's device; complex parameters are stored as real
            pairs.
        mesh: The whole mesh, data and domain axes.
        methods: Methods other than `forward` that run the module, such as `training_step`.
        dims: The dim of the fields that each domain axis splits, by default 2, 3, ...: along these
            the dense weights of spectral convolutions are split too (neuralop/split_weights.py).
        options: How parameters are sharded, gathered and cast.
        loaded: Names of submodules, "" for all, whose weights are to be loaded afterwards. Others
            on the meta device get their first values here (materialize.py).
        domain: The axes of the mesh along which samples are split, by name; by default those called
            "domain", "domain_0", "domain_1", ...

    Returns:
        The new parameter for each old one, to mend an optimizer that was made before.

    Raises:
        ValueError: An option names what the module or the mesh does not have.
        RuntimeError: The module is sharded over another mesh.
        NotImplementedError: A parameter has a hook.
    """
    if isinstance(module, FSDPModule):
        if (over := module.__dict__.get(_SHARDED_OVER, mesh)) != mesh:
            raise RuntimeError(
                f"the module is sharded over {over} since an earlier call, and cannot be used on "
                f"{mesh}; load its weights into a new module."
            )
        return {}
    ignored = _ignored(module, options.ignored_parameters)
    chosen = blocks(module, options.wrap, options.min_num_params)
    check_can_be_reset(module, loaded)
    before = dict(module.named_parameters(remove_duplicate=False))
    axes = (domain,) if isinstance(domain, str) else tuple(domain)
    split = domain_mesh(mesh, axes)
    if split is None:
        _warn_of_whole_spectra(module, mesh)
    avoid_whole_fields(module, split if split is not None and split.size() == 1 else None)
    _change_forward(module, chosen, options)
    if mesh.size() == 1 and not options.changes_one_process:
        return materialize(module, _device_of(mesh), loaded=loaded)
    group = flat_mesh(mesh).get_group()
    refuse_other_modules(module, options, group)
    _refuse_hooks(before)
    read_whole_numbers()
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            copy_from_first(tensor, group)
    replaced = store_as_pairs(module)
    ignored = {replaced.get(p, p) for p in ignored}
    if options.policy.param_dtype is not None:  # they compute in their own precision
        chosen = list(dict.fromkeys([*with_complex_parameters(module), *chosen]))
    if split is not None and split.size() > 1 and options.mode != "none":
        dims = range(2, 2 + split.ndim) if dims is None else dims
        for layer in split_by_mode(module, split, tuple(dims), ignored):
            shard_block(layer, replica_mesh(mesh, axes), options)  # over data replicas only
            show_split_weights(layer, tuple(dims))
    chosen = [b for b in chosen if not isinstance(b, FSDPModule)]
    plain = _shard_blocks(module, chosen, mesh, options, ignored)
    shards_on = torch.device("cpu") if options.cpu_offload else None
    made = materialize(module, _device_of(mesh), shards_on=shards_on, loaded=loaded, group=group)
    average_plain_gradients(module, [made.get(p, p) for p in plain], group)
    prefetch(module, options.prefetch)
    gathered = Gathered(module)
    for method in methods:
        plain_method = getattr(module, method)
        setattr(module, method, _returning_no_view(keeping_writes(plain_method, gathered)))
        register_fsdp_forward_method(module, method)
        counting = _in_replica_world(getattr(module, method), mesh, axes)
        if inspect.ismethod(plain_method):  # a function that was put there is given all arguments
            # Lightning looks behind one decorator for the arguments that a step takes
            counting.__dict__["__wrapped__"] = getattr(plain_method, "__wrapped__", plain_method)
        setattr(module, method, counting)
    _count_domains_once(module, mesh, axes)
    module.register_load_state_dict_pre_hook(_split_loaded)
    module.__dict__[_SHARDED_OVER] = mesh
    after = dict(module.named_parameters(remove_duplicate=False))
    return {before[name]: after[name] for name in before}


def _shard_blocks(
    module: nn.Module,
    chosen: Sequence[nn.Module],
    mesh: DeviceMesh,
    options: ShardingOptions,
    ignored: set[nn.Parameter],
) -> list[nn.Parameter]:
    """Put every parameter into the group of its block, or among the plain ones, returned."""
    placed = {p for m in module.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
    plain = ignored | {p for p in module.parameters() if p.ndim == 0}  # FSDP2 shards dim 0
    plain |= of_other_dtypes([*chosen, module], plain | placed)
    axes = parameter_mesh(mesh, options.mode)
    for block in chosen:
        shard_block(block, axes, options, plain | tied_outside(block, module))
    shard_block(module, axes, options, plain)
    return [p for p in module.parameters() if p in plain]


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


def _change_forward(
    module: nn.Module, chosen: Sequence[nn.Module], options: ShardingOptions
) -> None:
    if options.compile_blocks:  # first, so that what is recomputed is compiled
        compile_forward(chosen)
    again = _fitting(module, chosen, options, "activation_checkpointing")
    moved = _fitting(module, chosen, options, "activation_offload")
    inside = {part for block in again for part in block.modules()}
    if lost := inside & moved:
        raise ValueError(
            f"activation_offload has nothing to move in {type(next(iter(lost))).__name__}, which "
            "activation_checkpointing computes again; give each its own classes."
        )
    offload(moved)
    recompute(again, options.checkpoint_keeps)
    if options.activation_checkpointing:
        keep_no_cache(module)


def _fitting(
    module: nn.Module, chosen: Sequence[nn.Module], options: ShardingOptions, option: str
) -> set[nn.Module]:
    """The modules that an option names: classes, or True for the blocks."""
    names = getattr(options, option)
    return {*chosen} if names is True else named(module, names, option) if names else set()


def _refuse_hooks(parameters: dict[str, nn.Parameter]) -> None:
    """A hook would see the partial gradient of a rank, and FSDP2 drops it without a word."""
    for name, p in parameters.items():
        if has_hooks(p):
            raise NotImplementedError(
                f"the parameter {name} has a hook for its gradient (register_hook), which a "
                "sharded parameter does not call; change p.grad in on_before_optimizer_step, or in "
                "a script after backward."
            )


def _ignored(module: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """The parameters whose name fits a pattern, in the manner of a shell's file names."""
    named = dict(module.named_parameters(remove_duplicate=False))
    found: set[nn.Parameter] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fitting = {p for name, p in named.items() if fnmatchcase(name, pattern)}
        if not fitting:
            near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.3) or list(named)[:3]
            raise ValueError(
                f"ignored_parameters: no parameter's name fits {pattern!r}; names here are such as "
                f"{', '.join(near)}."
            )
        found |= fitting
    return found


def _returning_no_view(method: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2 warns of an output that is a view, as a squeezed loss is; it hooks a copy instead."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return no_views(method(*args, **kwargs))

    return wrapped


def _warn_of_whole_spectra(module: nn.Module, mesh: DeviceMesh) -> None:
    """Spectral layers are split by mode along axes that are known to split samples."""
    others = [n for n in mesh.mesh_dim_names or () if n not in ("data", "replicate", "shard")]
    spectral = any(is_a(layer, "neuralop", "SpectralConv") for layer in module.modules())
    if spectral and mesh.ndim > 1 and others:
        warnings.warn(
            f"none of the mesh's axes {list(mesh.mesh_dim_names or ())} is called domain, so the "
            "weights of spectral layers are not split by mode, and travel whole. If samples are "
            f"split along {others[-1]!r}, say so: parallelize(..., domain={others[-1]!r}).",
            stacklevel=3,
        )


def _count_domains_once(module: nn.Module, mesh: DeviceMesh, domain: Sequence[str]) -> None:
    """Let the module's own collectives go over data replicas, see replica_world."""
    open_ones: list[Any] = []

    def enter(*_: Any) -> None:
        open_ones.append(replica_world(mesh, domain))
        open_ones[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ones.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)


def _in_replica_world(
    method: Callable[..., Any], mesh: DeviceMesh, domain: Sequence[str]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with replica_world(mesh, domain):
            return method(*args, **kwargs)

    return wrapped


def _split_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let plain full tensors load into the sharded module."""
    pairs = pair_names(module)
    for name, p in module.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            state[prefix + name] = split_like(value, p, name in pairs)


def split_like(value: Tensor, parameter: Tensor, pairs: bool = False) -> Tensor:
    """This rank's shard of the full tensor `value`, laid out as `parameter`."""
    if pairs and value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
