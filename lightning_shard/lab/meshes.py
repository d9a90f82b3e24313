"""Lists the meshes on which a cluster can train with the fields of a batch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_shard.data.split import ShardDims
from lightning_shard.data.tree import leaves_of
from lightning_shard.lab.course import Mesh
from lightning_shard.processes.narrow import is_mapping


def extents_of(batch: Any, shard_dims: ShardDims = None) -> tuple[int, ...]:
    """The extents of the largest field of a batch along the dims that a domain may split.

    Args:
        batch: Of one data replica, whole.
        shard_dims: As for `HybridShardStrategy`.

    Returns:
        One extent for each dim; none if the batch has no field.
    """
    if isinstance(shard_dims, Mapping):
        named = {name: dims for name, dims in shard_dims.items() if dims is not None}
        found = [_extents(_entry(batch, name), dims) for name, dims in named.items()]
        return max(found, key=math.prod, default=())
    return _extents(batch, shard_dims)


def _entry(batch: Any, name: Any) -> Any:
    if is_mapping(batch):
        return batch.get(name)
    return batch[int(name)] if str(name).isdecimal() else getattr(batch, str(name), None)


def _extents(entry: Any, dims: int | Sequence[int] | None) -> tuple[int, ...]:
    fields = [
        x for x in leaves_of(entry)
        if isinstance(x, Tensor) and x.ndim > 2 and (dims is not None or x.is_floating_point())
    ]  # fmt: skip
    if not fields:
        return ()
    field = max(fields, key=lambda x: x.numel())
    if dims is None:
        return tuple(field.shape[2:])
    return tuple(field.shape[dim] for dim in ([dims] if isinstance(dims, int) else dims))


def meshes(devices: int, extents: Sequence[int]) -> list[Mesh]:
    """All meshes of so many devices, those of small domains first.

    Of domains that differ in the order of equal extents alone, that one is listed which splits the
    first dims more: its slabs lie together in memory. No dim is split into more parts than it has
    rows.

    Args:
        devices: Data replicas x domain ranks.
        extents: Of the dims that may be split.

    Returns:
        Of each mesh the data replicas, and then the ranks along each split dim.
    """
    found: list[Mesh] = []
    for ranks in range(1, devices + 1):
        if devices % ranks == 0:
            domains = [d for d in _domains(ranks, tuple(extents)) if _is_first(d, extents)]
            found += [(devices // ranks, *domain) for domain in sorted(domains, key=max)]
    return found


def _domains(ranks: int, extents: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Ranks along the first dims, at least two along each but for one rank alone."""
    if ranks == 1:
        yield (1,)
        return
    if not extents:
        return
    if ranks <= extents[0]:
        yield (ranks,)
    for first in range(2, min(ranks // 2, extents[0]) + 1):
        if ranks % first == 0:
            yield from ((first, *rest) for rest in _domains(ranks // first, extents[1:]))


def _is_first(domain: tuple[int, ...], extents: Sequence[int]) -> bool:
    sizes = zip(domain, domain[1:], extents, extents[1:], strict=False)
    return all(a >= b or extent != other for a, b, extent, other in sizes)
