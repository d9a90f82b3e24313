"""Arranges the processes as a mesh of named axes, and says which axes shard parameters.

Ranks of one node share a domain, so that halos stay within it where they can; then come the ranks
that share one set of parameters.
"""

import math
import socket
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_shard.processes.arguments import is_whole
from lightning_shard.processes.device import backends, carried
from lightning_shard.processes.failures.lone_waits import watch_lone_waits
from lightning_shard.processes.process_info import launcher, process_info
from lightning_shard.processes.subgroups import making_groups
from lightning_shard.processes.torch_private.internals import flattened
from lightning_shard.processes.torch_private.typed import integers

Sharding = Literal["auto", "full", "gradients", "none", "hybrid"]
_DATA = ("data", "replicate", "shard")  # axes that are never a domain

# the meshes that find_mesh returns, each with its processes
_of_trainer: tuple[dist.ProcessGroup | None, DeviceMesh] | None = None
_of_script: tuple[dist.ProcessGroup | None, DeviceMesh] | None = None


def make_mesh(
    device_type: str, data: int, domain: Sequence[int], *, shard_size: int | None = None
) -> DeviceMesh:
    """Make the mesh `("data", "domain")`, or `("data", "domain_0", ...)` for several split dims.

    Args:
        device_type: The type of every rank's device: "cuda", "xpu" or "cpu".
        data: Number of data replicas.
        domain: Number of ranks along each split dim.
        shard_size: Number of ranks, those of a domain included, that share one set of parameters.
            The mesh is then `("replicate", "shard", "domain", ...)`, and `mesh["data"]` is made of
            its first two axes.

    Raises:
        ValueError: The sizes do not multiply to the number of processes.
    """
    world, per_sample = dist.get_world_size(), math.prod(domain)
    if data * per_sample != world:
        raise ValueError(
            f"data_parallel_size {data} x domain_parallel_size {' x '.join(map(str, domain))} must "
            f"be the number of processes, {world}; change one of the sizes or start "
            f"{data * per_sample} processes."
        )
    names = mesh_names(len(domain))
    if shard_size is None:
        return _made(device_type, (data, *domain), names, dist.group.WORLD)
    if shard_size < 1 or shard_size % per_sample or world % shard_size:
        fitting = [n for n in range(per_sample, world + 1, per_sample) if world % n == 0]
        raise ValueError(
            f"shard_size {shard_size} must be a multiple of the {per_sample} processes of a domain "
            f"and divide the {world} processes; use one of {fitting}."
        )
    sizes = (world // shard_size, shard_size // per_sample, *domain)
    names = ("replicate", "shard", *names[1:])
    return _made(device_type, sizes, names, dist.group.WORLD)


def init_mesh(sizes: Mapping[str, int], device_type: str | None = None) -> DeviceMesh:
    """Return the mesh of all processes with axes of your names.

    The same sizes give the same mesh, in a Trainer its strategy's. `mesh["domain"]` is the group of
    this rank along an axis, `mesh["ensemble", "data"]` that along several; `shard`, `parallelize`
    and torch's own functions take either.

    Args:
        sizes: The size of each axis, by name; one of them may be -1: what is left. Ranks along the
            last axis are nearest to each other: on one node, where they can be. Axes along which
            samples are split are named "domain", or "domain_0", "domain_1", ...; other names are
            given to `parallelize` (its argument `domain`).
        device_type: "cpu", "cuda" or "xpu"; by default that of the process group.

    Raises:
        TypeError: The sizes have no names.
        ValueError: The sizes do not multiply to the number of processes, or the process group
            carries no device of this type.
        RuntimeError: There is no process group yet.
    """
    if not isinstance(sizes, Mapping):
        raise TypeError(
            f"the sizes of a mesh must have names, as in init_mesh({{'data': -1, 'domain': 2}}); "
            f"got {sizes!r}."
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group to make a mesh of; call start_process_group() first, or ask "
            "from within a Trainer or a launched function."
        )
    if not all(is_whole(n) or n == -1 for n in sizes.values()):
        raise ValueError(f"the sizes of a mesh must be whole numbers, or -1; got {dict(sizes)}.")
    if device_type is not None and device_type not in backends():
        raise ValueError(
            f"device_type {device_type!r} is none that the process group carries; use one of "
            f"{', '.join(backends())}, or leave it out."
        )
    world, known = dist.get_world_size(), math.prod(n for n in sizes.values() if n != -1)
    free = [name for name, size in sizes.items() if size == -1]
    filled = {n: world // max(known, 1) if size == -1 else size for n, size in sizes.items()}
    if len(free) > 1 or min(filled.values(), default=0) < 1 or math.prod(filled.values()) != world:
        raise ValueError(
            f"the sizes of the mesh, {dict(sizes)}, must multiply to the number of processes, "
            f"{world}; change one, or give one of them as -1."
        )
    shape, names = tuple(filled.values()), tuple(filled)
    mesh = _made(device_type or carried(), shape, names, dist.group.WORLD)
    watch_lone_waits()
    global _of_script
    _of_script = (dist.group.WORLD, mesh)
    return mesh


def share_mesh(mesh: DeviceMesh | None) -> None:
    """Let `find_mesh` return the mesh of a Trainer to all code of this process; None ends that."""
    global _of_trainer
    _of_trainer = None if mesh is None else (dist.group.WORLD, mesh)


def find_mesh(*axes: str) -> DeviceMesh | None:
    """Return the mesh that all code of this process shares, or axes of it by their names.

    While a Trainer runs it is the strategy's. In a script it is the last one of `init_mesh`. So
    code of a library finds a group by its name alone: `find_mesh("domain").get_group()` is its
    process group, `.size()` its number of ranks and `.get_local_rank()` the rank of this process.

    Args:
        axes: Names of axes, such as "domain"; without one the whole mesh is returned.

    Returns:
        The mesh. None if there is none yet, or if it has no axis of such a name.
    """
    shared = _of_trainer or _of_script
    if shared is None or not dist.is_initialized() or shared[0] is not dist.group.WORLD:
        return None
    mesh = shared[1]
    named = {*(mesh.mesh_dim_names or ())}
    if named >= {"replicate", "shard"}:
        named.add("data")  # both together are the data axis
    return (sub_mesh(mesh, axes) if axes else mesh) if named.issuperset(axes) else None


@lru_cache(maxsize=64)
def _made(
    device_type: str, sizes: tuple[int, ...], names: tuple[str, ...], _: dist.ProcessGroup | None
) -> DeviceMesh:
    """Make a mesh once for each set of processes: a new one has communicators and threads.

    torch would lend the default group to an axis of all processes. A domain gets one of its own, so
    that its group can be told from all processes (replica_world.py).
    """
    nodes = nodes_of_ranks()
    ranks = nearest_first(nodes, sizes)
    domain = math.prod(n for n, name in zip(sizes, names, strict=True) if _is_domain(name))
    reason = why_crossing(ranks.reshape(-1, domain), nodes)
    if reason is not None and dist.get_rank() == 0:
        warnings.warn(reason, stacklevel=4)
    lent = [n == len(nodes) > 1 and name not in _DATA for n, name in zip(sizes, names, strict=True)]
    own = [dist.get_backend() if each else None for each in lent]
    with making_groups():
        if torch.equal(ranks.flatten(), torch.arange(len(nodes), device="cpu")):
            mesh = init_device_mesh(
                device_type,
                sizes,
                mesh_dim_names=names,
                backend_override={n: each for n, each in zip(names, own, strict=True) if each},
            )
        else:
            pairs = tuple((each, None) for each in own)
            mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names, backend_override=pairs)
        if names[:2] == ("replicate", "shard"):
            flattened(mesh["replicate", "shard"], "data")
    return mesh


def _is_domain(name: str) -> bool:
    return name == "domain" or name.startswith("domain_")


def mesh_names(domain_axes: int) -> tuple[str, ...]:
    """Name the axes of a mesh with so many domain axes."""
    if domain_axes == 1:
        return ("data", "domain")
    return ("data", *(f"domain_{axis}" for axis in range(domain_axes)))


def sizes_of(mesh: DeviceMesh) -> dict[str, int]:
    """Count the ranks along each axis, by name."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def replicas_of(sizes: Mapping[str, int]) -> int:
    """Count the data replicas of a mesh with axes of these sizes."""
    return math.prod(size for name, size in sizes.items() if not _is_domain(name))


def domain_axes(mesh: DeviceMesh, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Find the axes along which samples are split: those `named`, by default those called domain.

    Raises:
        ValueError: The mesh has no axis of such a name.
    """
    names = mesh.mesh_dim_names or ()
    if missing := [name for name in named if name not in names]:
        raise ValueError(f"the mesh has no axis {missing[0]!r}; its axes are {list(names)}.")
    return tuple(name for name in names if (name in named if named else _is_domain(name)))


def domain_mesh(mesh: DeviceMesh, named: Sequence[str] = ()) -> DeviceMesh | None:
    """Return the domain axes of a mesh; None if it has none, or no others."""
    names = domain_axes(mesh, named)
    return sub_mesh(mesh, names) if names and len(names) < mesh.ndim else None


def replica_mesh(mesh: DeviceMesh, named: Sequence[str] = ()) -> DeviceMesh:
    """Return the axes that split no sample: `data`, or `replicate` and `shard`."""
    domain = domain_axes(mesh, named)
    return sub_mesh(mesh, tuple(n for n in mesh.mesh_dim_names or () if n not in domain))


def sub_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return `mesh[names]`, made once: torch 2.15 keeps some objects of each for ever.

    Each time `DeviceMesh.__getitem__` makes a `torch._dynamo.config.patch`, whose ContextVar stays
    in the context of the process.
    """
    return _sub_mesh(mesh, names, dist.group.WORLD)


@lru_cache(maxsize=64)
def _sub_mesh(mesh: DeviceMesh, names: tuple[str, ...], _: dist.ProcessGroup | None) -> DeviceMesh:
    """Make `mesh[names]`, once for each default group, since meshes outlive their groups."""
    return mesh[names]


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Put all ranks of the mesh on one axis, in the order that their process group has."""
    return mesh if mesh.ndim == 1 else _flat_mesh(mesh, dist.group.WORLD)


@lru_cache(maxsize=64)
def _flat_mesh(mesh: DeviceMesh, _: dist.ProcessGroup | None) -> DeviceMesh:
    """Make the flat mesh once for each default group: equal meshes may outlive their groups."""
    ranks = mesh.mesh.flatten()
    with making_groups():
        if (ranks.diff() > 0).all():
            return flattened(mesh, "all_ranks")
        return DeviceMesh(mesh.device_type, ranks.sort().values, mesh_dim_names=("all_ranks",))


def parameter_mesh(mesh: DeviceMesh, sharding: Sharding) -> DeviceMesh:
    """Return the mesh that FSDP2 takes: one axis that shards, or one that replicates beside it."""
    return _parameter_mesh(mesh, sharding, dist.group.WORLD)


@lru_cache(maxsize=64)
def _parameter_mesh(
    mesh: DeviceMesh, sharding: Sharding, _: dist.ProcessGroup | None
) -> DeviceMesh:
    """Make the mesh once for each default group, since meshes outlive their groups."""
    names = mesh.mesh_dim_names or ()
    if sharding == "none":
        copies = mesh.size()
    elif names[:2] == ("replicate", "shard"):
        copies = mesh.size(0)
    else:
        return flat_mesh(mesh)
    ranks = mesh.mesh.reshape(copies, -1).sort(dim=1).values
    with making_groups():
        return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("copies", "parts"))


def own_node() -> str:
    """Name the node of this process."""
    return f"{socket.gethostname()}/{process_info().node if launcher().tells_nodes else 0}"


def nodes_of_ranks() -> list[str]:
    """Find the node of each rank. All ranks must call it."""
    nodes = [""] * dist.get_world_size()
    dist.all_gather_object(nodes, own_node())
    return nodes


def nearest_first(nodes: Sequence[str], sizes: Sequence[int]) -> Tensor:
    """Arrange the ranks in the shape `sizes`, with the last axes within nodes where they can be.

    Along each axis they ascend, as in process groups, which order their ranks. Where that and the
    nodes exclude each other, the ranks stand in their own order.

    Args:
        nodes: The node of each rank.
        sizes: The sizes of the mesh; their product is the number of ranks.
    """
    own = torch.arange(len(nodes), device="cpu").reshape(*sizes)
    if not _crossing(own.reshape(sizes[0], -1), nodes):
        return own
    first = {node: nodes.index(node) for node in nodes}
    order = sorted(range(len(nodes)), key=lambda rank: (first[nodes[rank]], rank))
    near = _ascending(order, sizes)
    return near if all((near.diff(dim=d) > 0).all() for d in range(near.ndim)) else own


def _ascending(ranks: list[int], sizes: Sequence[int]) -> Tensor:
    """Arrange `ranks` in blocks, each in ascending order."""
    if len(sizes) == 1:
        return torch.tensor(sorted(ranks), device="cpu")
    block = len(ranks) // sizes[0]
    parts = [
        _ascending(ranks[start : start + block], sizes[1:]) for start in range(0, len(ranks), block)
    ]
    return torch.stack(sorted(parts, key=lambda part: int(part.flatten()[0])))


def _crossing(groups: Tensor, nodes: Sequence[str]) -> list[list[int]]:
    """Return the groups of ranks (groups, ranks) that are on several nodes."""
    return [group for group in map(integers, groups) if len({nodes[rank] for rank in group}) > 1]


def why_crossing(ranks: Tensor, nodes: Sequence[str]) -> str | None:
    """Say why groups of `ranks` (groups, ranks) are on several nodes; None: none is."""
    crossing = _crossing(ranks, nodes)
    if not crossing:
        return None
    size = ranks.shape[-1]
    counts = sorted({nodes.count(node) for node in set(nodes)})
    if size > counts[-1]:
        reason = f"a node has {counts[-1]} processes"
    elif any(count % size for count in counts):
        reason = f"it does not divide the {' or '.join(map(str, counts))} processes of each node"
    else:
        reason = "the launcher has numbered the ranks across nodes; let it fill one after the other"
    return (
        f"a domain of {size} processes is on several nodes (ranks {crossing[0]} on "
        f"{', '.join(sorted({nodes[rank] for rank in crossing[0]}))}), because {reason}: halos and "
        "Fourier modes travel between nodes in each layer."
    )


# meshes and groups are those of one process
PROCESS_STATE = {
    "_made": _made,
    "_sub_mesh": _sub_mesh,
    "_flat_mesh": _flat_mesh,
    "_parameter_mesh": _parameter_mesh,
    "_of_trainer": None,
    "_of_script": None,
}
