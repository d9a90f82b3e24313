"""Trains a network on all ranks of a mesh, with whole parameters or with shards of FSDP2.

Parameters know nothing of the domain. Each rank's gradient of the replicated loss is a partial one
(domain/comm.py), and the mean over all ranks of data x domain is the gradient. Of whole parameters
plain_gradients.py takes it. FSDP2 takes it by itself: it shards parameters over all ranks alike, so
their memory falls with every rank.
"""

import difflib
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.domain.subdomain import domain_of
from lightning_shard.fsdp.blocks import blocks, named, tied_outside
from lightning_shard.fsdp.check_same_module import check_same_module
from lightning_shard.fsdp.choose_sharding import choose_sharding
from lightning_shard.fsdp.complex_pairs import store_as_pairs
from lightning_shard.fsdp.kept_from_before import refuse_kept
from lightning_shard.fsdp.materialize import check_can_be_reset, materialize
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.fsdp.plain_gradients import average_plain_gradients
from lightning_shard.fsdp.refuse_flop_counts import refuse_flop_counts
from lightning_shard.fsdp.refuse_shards import refuse_shards
from lightning_shard.fsdp.same_blocks import same_blocks
from lightning_shard.fsdp.shard_block import (
    of_other_dtypes,
    prefetch,
    shard_block,
    with_complex_parameters,
)
from lightning_shard.fsdp.sparse_gradients import may_be_sparse
from lightning_shard.fsdp.split_weights import show_split_weights, split_by_mode
from lightning_shard.fsdp.step_hooks import (
    count_domains_once,
    gather_for_parts_called_alone,
    meet_outside_of_steps,
    open_around_steps,
    wrap_methods,
)
from lightning_shard.fsdp.step_writes import GATHERED, GatheredParameters, copy_attributes
from lightning_shard.fsdp.unused_parameters import UnusedParameters
from lightning_shard.fsdp.work import Moved, Work, copy_all_from_first, share_values
from lightning_shard.memory.neuralop.layers import avoid_whole_fields
from lightning_shard.memory.offload import WhatFits, offload
from lightning_shard.memory.recompute import compile_forward, keep_no_cache, recompute
from lightning_shard.processes.arguments import check_mesh, check_module, names_of
from lightning_shard.processes.mesh import flat_mesh, parameter_mesh, replica_mesh
from lightning_shard.processes.replica_world import make_replicas
from lightning_shard.processes.torch_private.internals import (
    hooks_of,
    own_parameters,
)
from lightning_shard.tensor.mixins import is_a

SHARDED_OVER = "_sharded_over"  # attribute of a module: its mesh


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    methods: Sequence[str] = (),
    dims: Sequence[int] | None = None,
    options: ShardingOptions = ShardingOptions("full"),  # noqa: B008 - it is frozen
    loaded: Sequence[str] = (),
    domain: str | Sequence[str] = (),
) -> Moved:
    """Prepare `module` to be trained on all ranks of `mesh`, in place; its classes stay theirs.

    Weights and buffers of the first rank go to all ranks. After `loss.backward()` of a loss that is
    the same on all ranks of a domain, each parameter's `.grad` holds the gradient of the mean loss
    over data replicas, or this rank's shard of it: nothing is left to all-reduce. By default
    parameters are sharded; `options=ShardingOptions("none")` leaves them whole. A module that is
    sharded already keeps its shards, and gets the buffers of the first rank again.

    Args:
        module: An ordinary module on the mesh's device; complex parameters are stored as real
            pairs.
        mesh: The whole mesh, data and domain axes.
        methods: Methods other than `forward` that run the module, such as `training_step`.
        dims: The dim of the fields that each domain axis splits, by default 2, 3, ...: along these
            the dense weights of spectral convolutions are split, too.
        options: The ways in which parameters are sharded, gathered and cast.
        loaded: Names of submodules, "" for all, whose weights are to be loaded afterwards. Others
            on the meta device get their first values here.
        domain: The axes of the mesh along which samples are split, by name; by default those called
            "domain", "domain_0", "domain_1", ...

    Returns:
        The new parameter for each old one, to mend an optimizer that was made before.

    Raises:
        ValueError: An option names what the module or the mesh does not have.
        TypeError: The module, the mesh or a list of names is none.
        RuntimeError: The module is sharded over another mesh.
        NotImplementedError: A parameter that is to be sharded has a hook.
    """
    check_mesh(mesh)
    check_module(module, "parallelize")
    if isinstance(module, FSDPModule):
        if (over := module.__dict__.get(SHARDED_OVER, mesh)) != mesh:
            raise RuntimeError(
                f"the module is sharded over {over} since an earlier call, and cannot be used on "
                f"{mesh}; load its weights into a new module."
            )
        copy_all_from_first(module.buffers(), flat_mesh(mesh).get_group())
        return {}
    options = options.on(mesh.device_type)
    if mesh.size() > 1:  # before the first collective, which ranks that differ would not end
        group = flat_mesh(mesh).get_group()
        check_same_module(module, options, group)
        options, _ = choose_sharding(options, module, _device_of(mesh), group)
    lists = names_of(methods, "methods"), names_of(loaded, "loaded"), names_of(domain, "domain")
    work = Work(module, mesh, lists[0], dims, options, *lists[1:])
    for step in _PREPARE:
        step(work)
    if mesh.size() == 1 and not options.needs_shards:
        return materialize(module, _device_of(mesh), loaded=loaded)
    for step in _KEEP_WHOLE if options.mode == "none" else _SHARD:
        step(work)
    return work.finished()


def _choose(work: Work) -> None:
    """Find the blocks, and the parameters that stay whole."""
    work.ignored = _ignored(work.module, work.options.ignored_parameters)
    work.chosen = blocks(work.module, work.options.wrap, work.options.min_num_params)


def _check_deferred(work: Work) -> None:
    check_can_be_reset(work.module, work.loaded)


def _avoid_whole_fields(work: Work) -> None:
    """Let spectral layers allocate parts of fields and modes only."""
    split = work.split
    if split is None:
        _warn_of_whole_spectra(work.module, work.mesh)
    avoid_whole_fields(work.module, split if split is not None and split.size() == 1 else None)


def _change_forward(work: Work) -> None:
    """Compile, recompute or offload the blocks that the options name."""
    module, options = work.module, work.options
    if options.compile_blocks:  # first, so that what is recomputed is compiled
        compile_forward(work.chosen)
    again = _fitting(work, "activation_checkpointing")
    fits = options.activation_offload is True
    budget = WhatFits(module) if fits else options.activation_budget
    moved = _fitting(work, "activation_offload") if budget is None else set[nn.Module]()
    inside = {part for block in again for part in block.modules()}
    if lost := inside & moved:
        raise ValueError(
            f"activation_offload has nothing to move in {type(next(iter(lost))).__name__}, which "
            "activation_checkpointing computes again; give each its own classes."
        )
    offload(
        moved if budget is None else [part for part in _called(module) if part not in inside],
        budget,
    )
    recompute(again, options.checkpoint_keeps)
    if options.activation_checkpointing:
        keep_no_cache(module)


def _called(module: nn.Module) -> list[nn.Module]:
    """Return a module and the parts that its forward, or a step beside it, calls itself."""
    found, looked_at = [module], [*module.children()]
    while looked_at:
        part = looked_at.pop()
        if type(part).forward is nn.Module.forward:  # a list of modules is not called
            looked_at += part.children()
        else:
            found.append(part)
    return found


def _fitting(work: Work, option: str) -> set[nn.Module]:
    """Return the modules that an option names: classes, or True or a size for the blocks."""
    names = getattr(work.options, option)
    return (
        {*work.chosen}
        if names is True or isinstance(names, str)
        else named(work.module, names, option)
        if names
        else set()
    )


def _refuse_hooks(work: Work) -> None:
    """Refuse a hook, which would see the partial gradient of a rank, and which FSDP2 drops."""
    for name, p in work.before.items():
        if any(hooks_of(p)):
            raise NotImplementedError(
                f"the parameter {name} has a hook for its gradient (register_hook), which a "
                "sharded parameter does not call: keep parameters whole with sharding='none', or "
                "change p.grad in on_before_optimizer_step, or in a script after backward."
            )


def _make_groups(work: Work) -> None:
    """Make the process groups that steps use, which all ranks make together.

    A step would be too late: some replicas may have no batch for the first one.
    """
    make_replicas(work.mesh, work.axes)
    if work.split is not None:
        domain_of(work.split)


def _average_gradients(work: Work) -> None:
    """Let the ranks average the gradients of all parameters, which are the module's own."""
    order = same_blocks(work.group)
    module = work.module
    average_plain_gradients(module, module.parameters(), work.group, order, all_of_module=True)


def _make_contiguous(work: Work) -> None:
    """Lay out parameters as FSDP2 wants them: those in channels_last, or transposed, are not."""
    for p in work.module.parameters():
        p.data = p.data.contiguous()


def _store_as_pairs(work: Work) -> None:
    """Store complex parameters as real pairs; their modules become blocks of their own."""
    replaced = store_as_pairs(work.module)
    work.ignored = {replaced.get(p, p) for p in work.ignored}
    if work.options.policy.param_dtype is not None:  # they compute in their own precision
        work.chosen = list(dict.fromkeys([*with_complex_parameters(work.module), *work.chosen]))


def _split_spectral_weights(work: Work) -> None:
    """Give each rank of a domain its modes of large spectral weights."""
    split, dims = work.split, work.dims
    if split is None or split.size() == 1:
        return
    dims = tuple(range(2, 2 + split.ndim) if dims is None else dims)
    for layer in split_by_mode(work.module, split, dims, work.ignored):
        replicas = replica_mesh(work.mesh, work.axes)
        shard_block(layer, replicas, work.options)  # over data replicas only
        show_split_weights(layer, dims)


def _shard(work: Work) -> None:
    """Put every parameter into the group of its block, or among the plain ones."""
    module, options = work.module, work.options
    chosen = [b for b in work.chosen if not isinstance(b, FSDPModule)]
    placed = {p for m in module.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
    # FSDP2 shards dim 0, and reduces no gradient without numbers
    plain = work.ignored | {p for p in module.parameters() if p.ndim == 0 or not p.numel()}
    sparse = {*may_be_sparse(module)}  # it sends dense gradients
    plain |= {p for p in module.parameters() if p in sparse}
    plain |= of_other_dtypes([*chosen, module], plain | placed)
    axes = parameter_mesh(work.mesh, options.mode)
    for block in chosen:
        shard_block(block, axes, options, plain | tied_outside(block, module))
    shard_block(module, axes, options, plain)
    work.plain = [p for p in module.parameters() if p in plain]


def _materialize(work: Work) -> None:
    """Give parameters of the meta device memory and first values."""
    made = materialize(
        work.module,
        _device_of(work.mesh),
        shards_on=torch.device("cpu") if work.options.cpu_offload else None,
        loaded=work.loaded,
        group=work.group,
    )
    work.plain = [made.get(p, p) for p in work.plain]


def _average_plain_gradients(work: Work) -> None:
    if work.plain:
        average_plain_gradients(work.module, work.plain, work.group)


def _reduce_unused_parameters(work: Work) -> None:
    UnusedParameters(work.module, work.group)


def _prefetch(work: Work) -> None:
    prefetch(work.module, work.options.prefetch)


def _leave_old_parameters(work: Work) -> None:
    """Give the new parameters what is set on the old ones, which nobody may compute with."""
    moved = {old: new for old, new in work.moved().items() if old is not new}
    for old, new in moved.items():
        copy_attributes(old, new)
    refuse_kept(moved)


def _split_what_is_loaded(work: Work) -> None:
    """Let `load_state_dict` of the module, and of each part of it, take plain full tensors."""
    gathered: GatheredParameters = work.module.__dict__[GATHERED]
    for module in work.module.modules():
        if any(p is not None for p in own_parameters(module).values()):
            module.register_state_dict_pre_hook(gathered.before_state)
            module.register_load_state_dict_pre_hook(gathered.before_load)
            module.register_load_state_dict_pre_hook(_split_loaded)


def _mark(work: Work) -> None:
    work.module.__dict__[SHARDED_OVER] = work.mesh


# The order of the steps matters. Beside each stands the reason for its place.
_PREPARE: tuple[Callable[[Work], None], ...] = (
    _choose,  # first: options name parameters and classes as the user wrote them
    _check_deferred,  # before anything changes, since it refuses
    _avoid_whole_fields,  # also on one process, where spectral layers then compute fewer modes
    _change_forward,  # under the hooks of FSDP2, which come later and so stay outside
)
_KEEP_WHOLE: tuple[Callable[[Work], None], ...] = (
    _make_groups,  # before any step
    lambda work: refuse_flop_counts(),  # before a step can begin
    share_values,
    _materialize,  # after the values of the others, which first values may need
    _average_gradients,  # its hooks belong to the parameters that have memory
    open_around_steps,
    count_domains_once,
)
_SHARD: tuple[Callable[[Work], None], ...] = (
    _make_groups,  # before any step
    _refuse_hooks,  # while parameters are the user's, which have the hooks
    lambda work: refuse_shards(),  # before anybody can read a number of a shard, or set its data
    lambda work: refuse_flop_counts(),  # before a step can begin
    share_values,  # while parameters are whole, and complex ones complex
    _make_contiguous,  # before FSDP2, which refuses others
    _store_as_pairs,  # before parameters are grouped by dtype
    _split_spectral_weights,  # these are sharded over fewer ranks, before the others are grouped
    _shard,
    _reduce_unused_parameters,  # after all groups are made
    _materialize,  # after sharding: only shards of the meta device get memory
    _average_plain_gradients,  # its hooks belong to the parameters that have memory
    _leave_old_parameters,  # once each parameter is the one that stays
    _prefetch,  # it links the blocks, so all must be sharded
    wrap_methods,  # outside of FSDP2's root, which gathers before a step
    count_domains_once,  # before FSDP2's own hooks of the root, and after them
    gather_for_parts_called_alone,
    meet_outside_of_steps,  # the last hooks, so that they run before FSDP2's
    _split_what_is_loaded,
    _mark,  # last: a module that failed on the way is not taken for a sharded one
)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


def _ignored(module: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """Return the parameters whose name fits a pattern, in the manner of a shell's file names."""
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


def _split_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let plain full tensors load into the parameters that `module` itself holds."""
    pairs = module.__dict__.get("_pairs", ())
    for name, p in own_parameters(module).items():
        value = state.get(prefix + name)
        if p is None or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == p.shape or name in pairs:  # else torch says that they differ
            state[prefix + name] = split_like(value, p, name in pairs)


def split_like(value: Tensor, parameter: Tensor, pairs: bool = False) -> Tensor:
    """Return this rank's shard of the full tensor `value`, laid out as `parameter`."""
    if pairs and value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
