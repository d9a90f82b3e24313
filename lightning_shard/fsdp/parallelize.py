"""Trains a network on all ranks of a mesh, with whole parameters or with shards of FSDP2.

Parameters know nothing of the domain. Each rank's gradient of the replicated loss is a partial one
(domain/comm.py), and the mean over all ranks of data x domain is the gradient. Of whole parameters
plain_gradients.py takes it. FSDP2 takes it by itself: it shards parameters over all ranks alike, so
their memory falls with every rank.
"""

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.domain.subdomain import domain_of
from lightning_shard.fsdp.blocks import blocks, is_a, named, tied_outside
from lightning_shard.fsdp.check_same_module import check_same_module
from lightning_shard.fsdp.choose_sharding import choose_sharding
from lightning_shard.fsdp.complex_pairs import store_as_pairs
from lightning_shard.fsdp.kept_from_before import refuse_kept
from lightning_shard.fsdp.materialize import check_can_be_reset, materialize
from lightning_shard.fsdp.meeting import meet
from lightning_shard.fsdp.neuralop.layers import avoid_whole_fields
from lightning_shard.fsdp.neuralop.split_weights import show_split_weights, split_by_mode
from lightning_shard.fsdp.no_sync import without_reduction
from lightning_shard.fsdp.offload import WhatFits, offload
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.fsdp.plain_gradients import average_plain_gradients, plain_gradients_of
from lightning_shard.fsdp.recompute import compile_forward, keep_no_cache, recompute
from lightning_shard.fsdp.refuse_flop_counts import refuse_flop_counts
from lightning_shard.fsdp.refuse_shards import refuse_shards
from lightning_shard.fsdp.same_blocks import same_blocks
from lightning_shard.fsdp.shard_block import (
    LocalTensors,
    class_name,
    no_views,
    of_other_dtypes,
    prefetch,
    shard_block,
    sharded_modules,
    with_complex_parameters,
)
from lightning_shard.fsdp.step_writes import (
    GATHERED,
    Gathered,
    Replaced,
    copy_attributes,
    refusing_writes,
)
from lightning_shard.fsdp.unused_parameters import UnusedParameters
from lightning_shard.ops.elementwise.whole_gradients import whole_gradients
from lightning_shard.processes.errors_together import copy_from_first
from lightning_shard.processes.mesh import domain_mesh, flat_mesh, parameter_mesh, replica_mesh
from lightning_shard.processes.replica_world import make_replicas, replica_world
from lightning_shard.processes.torch_private.internals import (
    backward_pass,
    gathered_by,
    hooks_of,
    own_parameters,
    tree_map_only,
)
from lightning_shard.tensor.tensor import DomainTensor

Moved = dict[nn.Parameter, nn.Parameter]

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
    over data ranks, or this rank's shard of it: nothing is left to all-reduce. By default
    parameters are sharded; `options=ShardingOptions("none")` leaves them whole.

    Args:
        module: An ordinary module on the mesh's device; complex parameters are stored as real
            pairs.
        mesh: The whole mesh, data and domain axes.
        methods: Methods other than `forward` that run the module, such as `training_step`.
        dims: The dim of the fields that each domain axis splits, by default 2, 3, ...: along these
            the dense weights of spectral convolutions are split too (neuralop/split_weights.py).
        options: The ways in which parameters are sharded, gathered and cast.
        loaded: Names of submodules, "" for all, whose weights are to be loaded afterwards. Others
            on the meta device get their first values here (materialize.py).
        domain: The axes of the mesh along which samples are split, by name; by default those called
            "domain", "domain_0", "domain_1", ...

    Returns:
        The new parameter for each old one, to mend an optimizer that was made before.

    Raises:
        ValueError: An option names what the module or the mesh does not have.
        RuntimeError: The module is sharded over another mesh.
        NotImplementedError: A parameter that is to be sharded has a hook.
    """
    if isinstance(module, FSDPModule):
        if (over := module.__dict__.get(SHARDED_OVER, mesh)) != mesh:
            raise RuntimeError(
                f"the module is sharded over {over} since an earlier call, and cannot be used on "
                f"{mesh}; load its weights into a new module."
            )
        return {}
    options = options.on(mesh.device_type)
    if mesh.size() > 1:  # before the first collective, which ranks that differ would not end
        group = flat_mesh(mesh).get_group()
        check_same_module(module, options, group)
        options, _ = choose_sharding(options, module, _device_of(mesh), group)
    axes = (domain,) if isinstance(domain, str) else tuple(domain)
    work = _Work(module, mesh, tuple(methods), dims, options, tuple(loaded), axes)
    for step in _PREPARE:
        step(work)
    if mesh.size() == 1 and not options.needs_shards:
        return materialize(module, _device_of(mesh), loaded=loaded)
    for step in _KEEP_WHOLE if options.mode == "none" else _SHARD:
        step(work)
    return work.finished()


class _Work:
    """A module on its way through the steps below, and what one step leaves for a later one.

    Attributes:
        axes: The names of the mesh axes along which samples are split, or none for the usual ones.
        split: The mesh of these axes, or None.
        before: The parameters by name, as the user made them.
        ignored: The parameters that the user wants whole.
        chosen: The blocks, inner ones first.
        plain: All parameters that stay whole on each rank.
        running: A context that is true while a step or a block runs.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        methods: Sequence[str],
        dims: Sequence[int] | None,
        options: ShardingOptions,
        loaded: Sequence[str],
        axes: tuple[str, ...],
    ) -> None:
        self.module, self.mesh, self.methods, self.dims = module, mesh, methods, dims
        self.options, self.loaded, self.axes = options, loaded, axes
        self.split = domain_mesh(mesh, axes)
        self.before = dict(module.named_parameters(remove_duplicate=False))
        self.ignored: set[nn.Parameter] = set()
        self.chosen: list[nn.Module] = []
        self.plain: list[nn.Parameter] = []
        self.running = _Running()

    def moved(self) -> Moved:
        """Return the present parameter for each that the user made."""
        after = dict(self.module.named_parameters(remove_duplicate=False))
        return {p: after[name] for name, p in self.before.items()}

    def finished(self) -> Moved:
        """Return what `moved` does, and keep no parameter that is now sharded.

        Hooks hold this object as long as the module lives, so they would hold all of the whole
        parameters, too.
        """
        moved = {old: new for old, new in self.moved().items() if old is not new}
        self.before.clear()
        return moved

    @functools.cached_property
    def group(self) -> dist.ProcessGroup:
        """All ranks that shard the module."""
        return flat_mesh(self.mesh).get_group()


class _Running:
    """A context that may be opened again inside, and is true while it is open."""

    def __init__(self) -> None:
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


def _choose(work: _Work) -> None:
    """Find the blocks, and the parameters that stay whole."""
    work.ignored = _ignored(work.module, work.options.ignored_parameters)
    work.chosen = blocks(work.module, work.options.wrap, work.options.min_num_params)


def _check_deferred(work: _Work) -> None:
    check_can_be_reset(work.module, work.loaded)


def _avoid_whole_fields(work: _Work) -> None:
    """Let spectral layers allocate parts of fields and modes only."""
    split = work.split
    if split is None:
        _warn_of_whole_spectra(work.module, work.mesh)
    avoid_whole_fields(work.module, split if split is not None and split.size() == 1 else None)


def _change_forward(work: _Work) -> None:
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


def _fitting(work: _Work, option: str) -> set[nn.Module]:
    """Return the modules that an option names: classes, or True or a size for the blocks."""
    names = getattr(work.options, option)
    return (
        {*work.chosen}
        if names is True or isinstance(names, str)
        else named(work.module, names, option)
        if names
        else set()
    )


def _refuse_hooks(work: _Work) -> None:
    """Refuse a hook, which would see the partial gradient of a rank, and which FSDP2 drops."""
    for name, p in work.before.items():
        if any(hooks_of(p)):
            raise NotImplementedError(
                f"the parameter {name} has a hook for its gradient (register_hook), which a "
                "sharded parameter does not call: keep parameters whole with sharding='none', or "
                "change p.grad in on_before_optimizer_step, or in a script after backward."
            )


def _make_groups(work: _Work) -> None:
    """Make the process groups that steps use, which all ranks make together.

    A step would be too late: some replicas may have no batch for the first one.
    """
    make_replicas(work.mesh, work.axes)
    if work.split is not None:
        domain_of(work.split)


def _share_values(work: _Work) -> None:
    """Copy parameters and buffers of the first rank to all others."""
    for tensor in (*work.module.parameters(), *work.module.buffers()):
        # a buffer that a step has made a split field has parts, which are not alike
        if not tensor.is_meta and not isinstance(tensor, DomainTensor):
            copy_from_first(tensor, work.group)


def _average_gradients(work: _Work) -> None:
    """Let the ranks average the gradients of all parameters, which are the module's own."""
    order = same_blocks(work.group)
    module = work.module
    average_plain_gradients(module, module.parameters(), work.group, order, all_of_module=True)


def _open_around_steps(work: _Work) -> None:
    """Let the methods that run the module count domains once, and see whole gradients."""
    for name in work.methods:
        setattr(work.module, name, _in_step(getattr(work.module, name), work))


def _make_contiguous(work: _Work) -> None:
    """Lay out parameters as FSDP2 wants them: those in channels_last, or transposed, are not."""
    for p in work.module.parameters():
        p.data = p.data.contiguous()


def _store_as_pairs(work: _Work) -> None:
    """Store complex parameters as real pairs; their modules become blocks of their own."""
    replaced = store_as_pairs(work.module)
    work.ignored = {replaced.get(p, p) for p in work.ignored}
    if work.options.policy.param_dtype is not None:  # they compute in their own precision
        work.chosen = list(dict.fromkeys([*with_complex_parameters(work.module), *work.chosen]))


def _split_spectral_weights(work: _Work) -> None:
    """Give each rank of a domain its modes of large spectral weights."""
    split, dims = work.split, work.dims
    if split is None or split.size() == 1:
        return
    dims = tuple(range(2, 2 + split.ndim) if dims is None else dims)
    for layer in split_by_mode(work.module, split, dims, work.ignored):
        replicas = replica_mesh(work.mesh, work.axes)
        shard_block(layer, replicas, work.options)  # over data replicas only
        show_split_weights(layer, dims)


def _shard(work: _Work) -> None:
    """Put every parameter into the group of its block, or among the plain ones."""
    module, options = work.module, work.options
    chosen = [b for b in work.chosen if not isinstance(b, FSDPModule)]
    placed = {p for m in module.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
    plain = work.ignored | {p for p in module.parameters() if p.ndim == 0}  # FSDP2 shards dim 0
    plain |= of_other_dtypes([*chosen, module], plain | placed)
    axes = parameter_mesh(work.mesh, options.mode)
    for block in chosen:
        shard_block(block, axes, options, plain | tied_outside(block, module))
    shard_block(module, axes, options, plain)
    work.plain = [p for p in module.parameters() if p in plain]


def _materialize(work: _Work) -> None:
    """Give parameters of the meta device memory and first values."""
    made = materialize(
        work.module,
        _device_of(work.mesh),
        shards_on=torch.device("cpu") if work.options.cpu_offload else None,
        loaded=work.loaded,
        group=work.group,
    )
    work.plain = [made.get(p, p) for p in work.plain]


def _average_plain_gradients(work: _Work) -> None:
    if work.plain:
        average_plain_gradients(work.module, work.plain, work.group)


def _reduce_unused_parameters(work: _Work) -> None:
    UnusedParameters(work.module, work.group)


def _prefetch(work: _Work) -> None:
    prefetch(work.module, work.options.prefetch)


def _leave_old_parameters(work: _Work) -> None:
    """Give the new parameters what is set on the old ones, which nobody may compute with."""
    moved = {old: new for old, new in work.moved().items() if old is not new}
    for old, new in moved.items():
        copy_attributes(old, new)
    refuse_kept(moved)


def _wrap_methods(work: _Work) -> None:
    """Let the steps run with whole parameters, refuse writes into them, and count domains once."""
    module = work.module
    gathered = module.__dict__[GATHERED] = Gathered(module)
    replaced = Replaced(module, work.plain)
    for name in work.methods:
        method = getattr(module, name)
        local = LocalTensors()
        setattr(module, name, _stripped(refusing_writes(method, gathered), local))
        register_fsdp_forward_method(module, name)  # wraps the attribute, so it is set before
        step = _as_step(getattr(module, name), work, replaced, local)
        if inspect.ismethod(method):  # a function that was put there is given all arguments
            # Lightning looks behind one decorator for the arguments that a step takes
            step.__dict__["__wrapped__"] = getattr(method, "__wrapped__", method)
        setattr(module, name, step)


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


def _in_step(method: Callable[..., Any], work: _Work) -> Callable[..., Any]:
    """Open around a step what holds while it runs."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with replica_world(work.mesh, work.axes), whole_gradients(work.split):
            return method(*args, **kwargs)

    return wrapped


def _as_step(
    method: Callable[..., Any], work: _Work, replaced: Replaced, local: LocalTensors
) -> Callable[..., Any]:
    """Open around a step, and so around FSDP2's hooks, what holds while it runs."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not work.running:
            replaced.take()
            work.module.__dict__[GATHERED].see_shards()
        gradients = whole_gradients(work.split, lambda: without_reduction(work.module))
        with work.running, replica_world(work.mesh, work.axes), gradients:
            output = local.restore(method(*args, **kwargs))
        if getattr(work.module, "automatic_optimization", True) is False:
            for block in sharded_modules(work.module):  # hooks know sharded parameters
                block.reshard()
        return output

    return wrapped


def _count_domains_once(work: _Work) -> None:
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


def _meet_outside_of_steps(work: _Work) -> None:
    """Let all ranks meet before a block gathers its parameters in a hook: one may be alone."""
    axes = parameter_mesh(work.mesh, work.options.mode)
    ranks = tuple(dist.get_process_group_ranks(axes.get_group(axes.ndim - 1)))
    if not work.methods or len(ranks) == 1:
        return  # a script runs the same on all ranks

    def enter(block: nn.Module, *_: Any) -> None:
        if not work.running and backward_pass() == -1 and _is_sharded(block):
            meet(
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


def _gather_for_parts_called_alone(work: _Work) -> None:
    """Gather a block whose layers a step calls one by one, as for a perceptual loss of features.

    FSDP2 gathers as the block itself is called. Its parameters then stay whole until backward.
    Compiled blocks are left out: a hook of a layer would break their graph.
    """
    if work.options.compile_blocks:
        return

    def enter(block: Any, *_: Any) -> None:
        if work.running and backward_pass() == -1 and _is_sharded(block):
            block.unshard()

    blocks = {b for b in sharded_modules(work.module) if b is not work.module}
    for block in blocks:
        assert isinstance(block, nn.Module)
        parts = {*block.modules()} - {block}
        parts -= {m for inner in parts & blocks for m in inner.modules()}
        for part in parts:
            if any(p is not None for p in own_parameters(part).values()):
                part.register_forward_pre_hook(functools.partial(enter, block), prepend=True)


def _split_what_is_loaded(work: _Work) -> None:
    """Let `load_state_dict` of the module, and of each part of it, take plain full tensors."""
    gathered: Gathered = work.module.__dict__[GATHERED]
    for module in work.module.modules():
        if any(p is not None for p in own_parameters(module).values()):
            module.register_state_dict_pre_hook(gathered.before_state)
            module.register_load_state_dict_pre_hook(gathered.before_load)
            module.register_load_state_dict_pre_hook(_split_loaded)


def _mark(work: _Work) -> None:
    work.module.__dict__[SHARDED_OVER] = work.mesh


# The order of the steps matters. Beside each stands the reason for its place.
_PREPARE: tuple[Callable[[_Work], None], ...] = (
    _choose,  # first: options name parameters and classes as the user wrote them
    _check_deferred,  # before anything changes, since it refuses
    _avoid_whole_fields,  # also on one process, where spectral layers then compute fewer modes
    _change_forward,  # under the hooks of FSDP2, which come later and so stay outside
)
_KEEP_WHOLE: tuple[Callable[[_Work], None], ...] = (
    _make_groups,  # before any step
    lambda work: refuse_flop_counts(),  # before a step can begin
    _share_values,
    _materialize,  # after the values of the others, which first values may need
    _average_gradients,  # its hooks belong to the parameters that have memory
    _open_around_steps,
    _count_domains_once,
)
_SHARD: tuple[Callable[[_Work], None], ...] = (
    _make_groups,  # before any step
    _refuse_hooks,  # while parameters are the user's, which have the hooks
    lambda work: refuse_shards(),  # before anybody can read a number of a shard, or set its data
    lambda work: refuse_flop_counts(),  # before a step can begin
    _share_values,  # while parameters are whole, and complex ones complex
    _make_contiguous,  # before FSDP2, which refuses others
    _store_as_pairs,  # before parameters are grouped by dtype
    _split_spectral_weights,  # these are sharded over fewer ranks, before the others are grouped
    _shard,
    _reduce_unused_parameters,  # after all groups are made
    _materialize,  # after sharding: only shards of the meta device get memory
    _average_plain_gradients,  # its hooks belong to the parameters that have memory
    _leave_old_parameters,  # once each parameter is the one that stays
    _prefetch,  # it links the blocks, so all must be sharded
    _wrap_methods,  # outside of FSDP2's root, which gathers before a step
    _count_domains_once,  # before FSDP2's own hooks of the root, and after them
    _gather_for_parts_called_alone,
    _meet_outside_of_steps,  # the last hooks, so that they run before FSDP2's
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
