"""The mesh, and FSDP2 over all of its ranks.

Parameters know nothing of the domain: they are sharded over data x domain ranks alike, so their
memory falls with every rank. Each rank's gradient of the replicated loss is a partial one
(comm.py), and the mean over all ranks, which FSDP2 takes by itself, is the gradient.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_shard.complex_params import pair_names, store_as_pairs
from lightning_shard.fno_layers import avoid_whole_fields
from lightning_shard.mode_shards import show_split_weights, split_by_mode
from lightning_shard.placement import pack, unpack
from lightning_shard.tensor import DomainTensor

MIN_BLOCK_NUMEL = 100_000  # smaller blocks are gathered with the root: one collective less


def make_mesh(device_type: str, data: int, domain: Sequence[int]) -> DeviceMesh:
    """The mesh `("data", "domain")`, or `("data", "domain_0", "domain_1", ...)` for several dims.

    Neighbouring ranks share a domain, so that halos stay within a node where they can.

    Raises:
        ValueError: The sizes do not multiply to the number of processes.
    """
    world = dist.get_world_size()
    if data * math.prod(domain) != world:
        raise ValueError(
            f"data_parallel_size {data} x domain_parallel_size {_times(domain)} must be the "
            f"number of processes, {world}; change one of the sizes or start "
            f"{data * math.prod(domain)} processes."
        )
    return init_device_mesh(device_type, (data, *domain), mesh_dim_names=mesh_names(len(domain)))


def mesh_names(domain_axes: int) -> tuple[str, ...]:
    if domain_axes == 1:
        return ("data", "domain")
    return ("data", *(f"domain_{axis}" for axis in range(domain_axes)))


def _times(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    methods: Sequence[str] = (),
    dims: Sequence[int] | None = None,
) -> dict[nn.Parameter, nn.Parameter]:
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
            the dense weights of spectral convolutions are split too (mode_shards.py).

    Returns:
        The new parameter for each old one, to mend an optimizer that was made before.
    """
    if isinstance(module, FSDPModule):
        return {}
    before = dict(module.named_parameters(remove_duplicate=False))
    domain = _domain_mesh(mesh)
    avoid_whole_fields(module, domain if domain is not None and domain.size() == 1 else None)
    if mesh.size() == 1:
        return {}
    flat = mesh if mesh.ndim == 1 else mesh._flatten("all_ranks")
    group = flat.get_group()
    for tensor in (*module.parameters(), *module.buffers()):
        data = tensor.detach()
        dist.broadcast(
            torch.view_as_real(data) if data.is_complex() else data, group=group, group_src=0
        )
    store_as_pairs(module)
    scalars = {p for p in module.parameters() if p.ndim == 0}  # FSDP2 shards dim 0
    for scalar in scalars:
        scalar.register_hook(functools.partial(_mean_over_ranks, group=group))
    if domain is not None and domain.size() > 1:
        _shard_modes(module, mesh, domain, dims)
    for block in (*blocks(module), module):
        if not isinstance(block, FSDPModule):
            _shard_block(block, flat, scalars)
    for method in methods:
        setattr(module, method, _returning_no_view(getattr(module, method)))
        register_fsdp_forward_method(module, method)
    module.register_load_state_dict_pre_hook(_split_loaded)
    after = dict(module.named_parameters(remove_duplicate=False))
    return {before[name]: after[name] for name in before}


def _domain_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The domain axes of a mesh that `make_mesh` made."""
    names = mesh.mesh_dim_names or ()
    return mesh[names[1:]] if names[:1] == ("data",) and len(names) > 1 else None


def _shard_modes(
    module: nn.Module, mesh: DeviceMesh, domain: DeviceMesh, dims: Sequence[int] | None
) -> None:
    """Spectral weights split by mode over the domain, and sharded over data replicas."""
    dims = tuple(range(2, 2 + domain.ndim)) if dims is None else tuple(dims)
    for layer in split_by_mode(module, domain, dims):
        _shard_block(layer, mesh["data"], set())
        show_split_weights(layer, dims)


def _shard_block(block: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    sharded = fully_shard(block, mesh=mesh, ignored_params=ignored)
    if mesh.device_type == "cpu":  # gloo has no pre-multiplied sum
        sharded.set_force_sum_reduction_for_comms(True)
    _show_local_tensors_to_fsdp(block)


def blocks(root: nn.Module) -> Iterator[nn.Module]:
    """The elements of module lists and sequences that are worth a gather of their own."""
    shared = _shared_parameters(root)

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        repeated = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        for child in module.children():
            own = set(child.parameters())
            large = sum(p.numel() for p in own) >= MIN_BLOCK_NUMEL
            if repeated and large and not own & shared and not isinstance(child, nn.ModuleList):
                yield child
            else:
                yield from walk(child)

    return walk(root)


def _returning_no_view(method: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2 warns of an output that is a view, as a squeezed loss is; it hooks a copy instead."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        return output.clone() if type(output) is Tensor and output._is_view() else output

    return wrapped


def _shared_parameters(root: nn.Module) -> set[nn.Parameter]:
    seen: set[nn.Parameter] = set()
    shared: set[nn.Parameter] = set()
    for module in root.modules():
        for p in module._parameters.values():
            if p is not None:
                (shared if p in seen else seen).add(p)
    return shared


def _show_local_tensors_to_fsdp(block: nn.Module) -> None:
    """FSDP2's hooks apply autograd functions to a block's inputs and outputs: show local ones.

    Of the four hooks one runs before FSDP's and one after it, on the way in and on the way out.
    """
    waiting: list[Any] = []

    def strip(value: Any) -> Any:
        leaves, spec = tree_flatten(value)
        packed = [
            unpack(leaf) if isinstance(leaf, DomainTensor) else (leaf, None) for leaf in leaves
        ]
        waiting.append([layout for _, layout in packed])
        return tree_unflatten([leaf for leaf, _ in packed], spec)

    def restore(value: Any) -> Any:
        leaves, spec = tree_flatten(value)
        layouts = waiting.pop()
        return tree_unflatten(
            [
                pack(leaf, x) if x is not None else leaf
                for leaf, x in zip(leaves, layouts, strict=True)
            ],
            spec,
        )

    block.register_forward_pre_hook(
        lambda _, args, kwargs: strip((args, kwargs)), prepend=True, with_kwargs=True
    )
    block.register_forward_pre_hook(
        lambda _, args, kwargs: restore((args, kwargs)), with_kwargs=True
    )
    block.register_forward_hook(lambda _, __, output: strip(output), prepend=True)
    block.register_forward_hook(lambda _, __, output: restore(output))


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


def _mean_over_ranks(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    mean = gradient / dist.get_world_size(group)
    dist.all_reduce(mean, group=group)
    return mean
