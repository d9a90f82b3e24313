"""Which dims of which batch entries a domain splits, and keeping this rank's part of them."""

import copy
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_shard.placement import from_local, shard
from lightning_shard.tensor import DomainTensor

Dims = int | Sequence[int]
ShardDims = Dims | Mapping[str, Dims | None] | None


def shard_batch(batch: Any, mesh: DeviceMesh, shard_dims: ShardDims = None) -> Any:
    """`batch` with its fields split over the domain mesh; all else stays whole on every rank.

    Args:
        batch: Nested dicts, lists and tuples of tensors, equal on all ranks of the domain.
        mesh: The domain mesh, of one or several axes.
        shard_dims: None: of every floating-point tensor (B, C, *spatial) the first spatial dims,
        one
            for each mesh axis. An int, or one for each mesh axis: these dims of every
            floating-point tensor of 3 dims or more. A mapping: for each key of the batch (the
            position, for a tuple) its dims, or None to leave the entry whole, as are entries that
            are not named.

    Raises:
        ValueError: A dim is named that an entry does not have, or a key that the batch does not
        have.
    """
    axes = mesh.ndim
    if isinstance(shard_dims, Mapping):
        entries = _entries(batch)
        if missing := [key for key in shard_dims if str(key) not in entries]:
            raise ValueError(
                f"shard_dims names the batch entry {missing[0]!r}, but the batch has "
                f"{list(entries)}; use one of these."
            )
        split = {
            key: value
            if (named := _named(shard_dims, key)) is None
            else _apply(value, mesh, named, key)
            for key, value in entries.items()
        }
        return _rebuild(batch, split)
    default = shard_dims is None
    dims = tuple(range(2, 2 + axes)) if shard_dims is None else shard_dims

    def field(x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.ndim < 3 or (default and x.ndim < 2 + axes):
            return x
        return _split(x, mesh, dims, "a batch entry")

    return apply_to_collection(batch, Tensor, field)


def check_same_batch(batch: Any, mesh: DeviceMesh) -> None:
    """Compare what the ranks of the domain have read, of which all must call this.

    Raises:
        ValueError: They have read different samples, whose parts make up no field.
    """
    leaves = tree_flatten_with_path(batch)[0]
    read = {keystr(path): _checksum(x) for path, x in leaves if isinstance(x, Tensor)}
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        everywhere: list[dict[str, Any]] = [{}] * mesh.size(axis)
        dist.all_gather_object(everywhere, read, group)
        for entry in read:
            if len({each.get(entry) for each in everywhere}) > 1:
                raise ValueError(
                    f"the ranks {dist.get_process_group_ranks(group)} share each sample, but read "
                    f"different batches (entry {entry}); give them the same samples in the same "
                    "order (trainer.distributed_sampler_kwargs says which replica reads what) and "
                    "draw augmentations from the same seed."
                )


def _checksum(x: Tensor) -> tuple[Any, ...]:
    values = torch.view_as_real(x) if x.is_complex() else x
    values = values.detach().cpu().contiguous()
    return (
        tuple(x.shape),
        str(x.dtype),
        zlib.crc32(values.flatten().view(torch.uint8).numpy().tobytes()),
    )


def split_dims(shard_dims: ShardDims) -> tuple[int, ...] | None:
    """The dims along which all named fields are split, counted from the front; None: not known."""
    named = list(shard_dims.values()) if isinstance(shard_dims, Mapping) else [shard_dims]
    chosen = {(d,) if isinstance(d, int) else tuple(d) for d in named if d is not None}
    dims = chosen.pop() if len(chosen) == 1 else ()
    return dims if dims and min(dims) >= 0 else None


def _apply(value: Any, mesh: DeviceMesh, dims: Dims, key: str) -> Any:
    return apply_to_collection(
        value, Tensor, lambda x: _split(x, mesh, dims, f"batch entry {key!r}")
    )


def _split(x: Tensor, mesh: DeviceMesh, dims: Dims, what: str) -> Tensor:
    if isinstance(x, DomainTensor):
        return x
    chosen = [dims] if isinstance(dims, int) else list(dims)
    if any(not -x.ndim <= d < x.ndim for d in chosen):
        raise ValueError(
            f"shard_dims {chosen} of {what} must lie in its shape {tuple(x.shape)}; name dims "
            f"from 0 to {x.ndim - 1}."
        )
    local = shard(x, mesh, dims).to_local().clone()  # a copy, so that the whole sample can be freed
    return from_local(local, mesh, dims, x.shape)


def _named(shard_dims: Mapping[str, Dims | None], key: str) -> Dims | None:
    return next((dims for name, dims in shard_dims.items() if str(name) == key), None)


def _entries(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(key): value for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return {str(i): value for i, value in enumerate(batch)}
    return {"0": batch}


def _rebuild(batch: Any, entries: dict[str, Any]) -> Any:
    """A collection of the type of `batch` with other values."""
    if isinstance(batch, Mapping):
        rebuilt = copy.copy(batch)
        rebuilt.update({key: entries[str(key)] for key in batch})  # pyright: ignore[reportAttributeAccessIssue]
        return rebuilt
    if isinstance(batch, list | tuple):
        values = list(entries.values())
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return entries["0"]
