"""Finds the extents of a batch that a mesh may split."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_shard.data.split import ShardDims
from lightning_shard.data.tree import leaves_of
from lightning_shard.processes.narrow import is_mapping


def extents_of(batch: Any, shard_dims: ShardDims = None) -> tuple[int, ...]:
    """Return the extents of a batch's largest field along the dims that a domain may split.

    Args:
        batch: The whole batch of one data replica.
        shard_dims: The dims that may be split; see `HybridShardStrategy`.

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


def refuse_empty_parts(mesh: Sequence[int], extents: Sequence[int], parts: str) -> None:
    """Refuse a mesh with more parts along a dim than the largest field has rows there.

    Args:
        mesh: The data replicas, and the parts along each split dim.
        extents: The extents of the dims that may be split.
        parts: The word for them: "ranks" or "tiles".

    Raises:
        ValueError: Some parts would be empty.
    """
    for count, extent in zip(mesh[1:], extents, strict=False):
        if count > extent:
            raise ValueError(
                f"{count} {parts} cannot share a dim of {extent} row{'s' * (extent > 1)}, since "
                f"some would have none of it; take at most {extent} along this dim."
            )
