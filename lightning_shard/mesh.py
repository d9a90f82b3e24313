"""The processes as a mesh of named axes, and the axes over which parameters are sharded.

Neighbouring ranks share a domain, so that halos stay within a node where they can; then come the
ranks that share one set of parameters.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Sharding = Literal["full", "gradients", "none", "hybrid"]


def make_mesh(
    device_type: str, data: int, domain: Sequence[int], *, shard_size: int | None = None
) -> DeviceMesh:
    """The mesh `("data", "domain")`, or `("data", "domain_0", "domain_1", ...)` for several dims.

    Args:
        device_type: Of all ranks: "cuda", "xpu" or "cpu".
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
    return _made(device_type, data, tuple(domain), shard_size, dist.group.WORLD)


@lru_cache(maxsize=64)
def _made(
    device_type: str,
    data: int,
    domain: tuple[int, ...],
    shard_size: int | None,
    _: dist.ProcessGroup | None,
) -> DeviceMesh:
    """Once for each set of processes: every new mesh has communicators and threads of its own."""
    world, per_sample = dist.get_world_size(), math.prod(domain)
    names = mesh_names(len(domain))
    if shard_size is None:
        return init_device_mesh(device_type, (data, *domain), mesh_dim_names=names)
    if shard_size < 1 or shard_size % per_sample or world % shard_size:
        fitting = [n for n in range(per_sample, world + 1, per_sample) if world % n == 0]
        raise ValueError(
            f"shard_size {shard_size} must be a multiple of the {per_sample} processes of a domain "
            f"and divide the {world} processes; use one of {fitting}."
        )
    sizes = (world // shard_size, shard_size // per_sample, *domain)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard", *names[1:]))
    mesh["replicate", "shard"]._flatten("data")
    return mesh


def mesh_names(domain_axes: int) -> tuple[str, ...]:
    if domain_axes == 1:
        return ("data", "domain")
    return ("data", *(f"domain_{axis}" for axis in range(domain_axes)))


def domain_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The domain axes of a mesh that `make_mesh` made."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name.startswith("domain"))
    return mesh[names] if names and len(names) < mesh.ndim else None


def replica_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The other axes: `data`, or `replicate` and `shard`."""
    names = tuple(n for n in mesh.mesh_dim_names or () if not n.startswith("domain"))
    return mesh[names]


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks of the mesh on one axis."""
    return mesh if mesh.ndim == 1 else mesh._flatten("all_ranks")


def parameter_mesh(mesh: DeviceMesh, sharding: Sharding) -> DeviceMesh:
    """What FSDP2 takes: one axis that shards, or one that replicates and one that shards."""
    return _parameter_mesh(mesh, sharding, dist.group.WORLD)


@lru_cache(maxsize=64)
def _parameter_mesh(
    mesh: DeviceMesh, sharding: Sharding, _: dist.ProcessGroup | None
) -> DeviceMesh:
    """Of these processes: meshes are equal also where the groups of the former are destroyed."""
    names = mesh.mesh_dim_names or ()
    if sharding == "none":
        copies = mesh.size()
    elif names[:2] == ("replicate", "shard"):
        copies = mesh.size(0)
    else:
        return flat_mesh(mesh)
    ranks = mesh.mesh.reshape(copies, -1)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("copies", "parts"))
