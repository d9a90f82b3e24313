"""Finds the dims of batch entries that a domain splits, and keeps this rank's part of them."""

import copy
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.data.graphs import (
    each_graph,
    entries_of,
    is_graph,
    split_nodes_and_edges,
    with_entries,
)
from lightning_shard.data.local_part import LocalPart
from lightning_shard.data.records import (
    as_dicts,
    fields_of,
    is_record,
    map_leaves,
    with_fields,
)
from lightning_shard.processes.torch_internals import (
    FakeTensor,
    keystr,
    tree_flatten_with_path,
    tree_leaves,
)
from lightning_shard.processes.typed import is_list, is_mapping
from lightning_shard.tensor.placement import shard
from lightning_shard.tensor.tensor import DomainTensor

Dims = int | Sequence[int]
ShardDims = Dims | Mapping[str, Dims | None] | None


def shard_batch(batch: Any, mesh: DeviceMesh, shard_dims: ShardDims = None) -> Any:
    """Split the fields of `batch` over the domain mesh; all else stays whole on every rank.

    Args:
        batch: Nested dicts, lists, tuples and dataclasses of tensors, equal on all ranks of the
            domain, or of parts that each rank has read for itself (`LocalPart`).
        mesh: The domain mesh, of one or several axes.
        shard_dims: None: of every floating-point tensor (B, C, *spatial) the first spatial dims,
            one for each mesh axis. An int, or one for each mesh axis: these dims of every
            floating-point tensor of 3 dims or more. In both cases a tensor of another dtype, or
            without channels, that has the samples and the spatial extents of such a field is split
            with it, as (B, H, W) classes with a (B, C, H, W) image. A mapping: for each key of the
            batch (the position, for a tuple; the field, for a dataclass) its dims, or None to leave
            the entry whole, as are entries that are not named. A graph of torch_geometric is split
            by nodes and edges: all mesh axes split the rows of each such tensor. If the batch is a
            graph, a mapping names its tensors.

    Raises:
        ValueError: A dim is named that an entry does not have, or a key that the batch does not
            have.
    """
    if isinstance(shard_dims, Mapping):
        entries = _entries(batch)
        if missing := [key for key in shard_dims if str(key) not in entries]:
            raise ValueError(
                f"shard_dims names the batch entry {missing[0]!r}, but the batch has "
                f"{list(entries)}; use one of these."
            )
        split = {key: _apply(value, mesh, shard_dims, key) for key, value in entries.items()}
        return _rebuild(batch, split)
    return _apply(batch, mesh, shard_dims, "", _fields(batch, shard_dims, mesh.ndim))


def check_same_batch(batch: Any, mesh: DeviceMesh) -> None:
    """Compare what the ranks of the domain have read. All of them must call this.

    Raises:
        ValueError: They have read different samples, whose parts make up no field.
    """
    leaves = tree_flatten_with_path(opened(batch))[0]
    read = {keystr(p): identity_of(x) for p, x in leaves if isinstance(x, Tensor | LocalPart)}
    if found := first_difference(read, mesh):
        ranks, entry = found
        raise ValueError(
            f"the ranks {ranks} share each sample, but read different batches (entry {entry}); "
            "give them the same samples in the same order (trainer.distributed_sampler_kwargs says "
            "which replica reads what) and draw augmentations from the same seed."
        )


def opened(batch: Any) -> Any:
    """The batch with each graph, and each dataclass, as a dict of what it holds."""
    return as_dicts(each_graph(batch, entries_of))


def leaves_of(batch: Any) -> list[Any]:
    """All that is in a batch and holds nothing else."""
    return tree_leaves(opened(batch))


def first_difference(values: Mapping[str, Any], mesh: DeviceMesh) -> tuple[list[int], str] | None:
    """The ranks of an axis that differ, and the first name whose values do. All ranks must call."""
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        everywhere: list[Mapping[str, Any]] = [{}] * mesh.size(axis)
        dist.all_gather_object(everywhere, values, group)
        for name in dict.fromkeys(name for each in everywhere for name in each):
            if any(each.get(name) != everywhere[0].get(name) for each in everywhere):
                return dist.get_process_group_ranks(group), name
    return None


def dims_of(
    shard_dims: ShardDims, entry: str, ndim: int, dtype: torch.dtype, axes: int
) -> Dims | None:
    """Find the dims of a batch entry that so many axes of a domain split; None: it stays whole."""
    if isinstance(shard_dims, Mapping):
        return next((dims for name, dims in shard_dims.items() if str(name) == entry), None)
    if not dtype.is_floating_point or ndim < 3 or (shard_dims is None and ndim < 2 + axes):
        return None
    return tuple(range(2, 2 + axes)) if shard_dims is None else shard_dims


def identity_of(x: Tensor | LocalPart) -> tuple[Any, ...]:
    """What equals on all ranks that have the same samples."""
    if isinstance(x, LocalPart):
        return (x.shape, str(x.tensor.dtype), x.samples)
    if isinstance(x, DomainTensor | FakeTensor):  # the values of a fake one are nowhere
        return (tuple(x.shape), str(x.dtype))
    values = torch.view_as_real(x) if x.is_complex() else x
    values = values.detach().cpu().contiguous()
    return (
        tuple(x.shape),
        str(x.dtype),
        zlib.crc32(values.flatten().view(torch.uint8).numpy().tobytes()),
    )


def split_dims(shard_dims: ShardDims) -> tuple[int, ...] | None:
    """Find the dims along which all named fields are split, from the front; None: not known."""
    named = list(shard_dims.values()) if isinstance(shard_dims, Mapping) else [shard_dims]
    chosen = {(d,) if isinstance(d, int) else tuple(d) for d in named if d is not None}
    dims = chosen.pop() if len(chosen) == 1 else ()
    return dims if dims and min(dims) >= 0 else None


def _apply(
    value: Any, mesh: DeviceMesh, shard_dims: ShardDims, key: str, fields: Sequence["_Field"] = ()
) -> Any:
    what = f"batch entry {key!r}" if key else "a batch entry"
    if not isinstance(shard_dims, Mapping) or _is_named(shard_dims, key):
        value = each_graph(value, lambda graph: _split_graph(graph, mesh))

    def field(x: Tensor | LocalPart) -> Tensor:
        rows = x.tensor if isinstance(x, LocalPart) else x
        dims = dims_of(shard_dims, key, len(x.shape), rows.dtype, mesh.ndim)
        if dims is None or (shard_dims is None and isinstance(x, Tensor)):
            dims = next((f.dims_of_map(x.shape) for f in fields if f.has_map(x.shape)), dims)
        if dims is not None:
            return _split(x, mesh, dims, what)
        if isinstance(x, LocalPart):
            raise ValueError(
                f"{what} of shape {tuple(x.shape)} was read in parts, but shard_dims leaves it "
                "whole; give slab_of the key under which the batch has it."
            )
        return x

    return map_leaves(lambda leaf: apply_to_collection(leaf, (Tensor, LocalPart), field), value)


def _is_named(shard_dims: Mapping[str, Dims | None], key: str) -> bool:
    return any(str(name) == key and dims is not None for name, dims in shard_dims.items())


def _split_graph(graph: Any, mesh: DeviceMesh) -> Any:
    def split(x: Tensor, dims: tuple[int, ...], key: str) -> Tensor:
        return _split(x, mesh, dims, f"the graph's {key!r}")

    return split_nodes_and_edges(graph, mesh.ndim, split)


class _Field(NamedTuple):
    """A field (B, C, *spatial) that is split along spatial dims."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    def has_map(self, shape: Sequence[int]) -> bool:
        """Say whether `shape` is (B, *spatial), or (B, any, *spatial), of this field."""
        spatial = self.shape[2:]
        without_channels = tuple(shape[1:]) == spatial
        same_dims = len(shape) == len(self.shape) and tuple(shape[2:]) == spatial
        return tuple(shape[:1]) == self.shape[:1] and (without_channels or same_dims)

    def dims_of_map(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(dim - len(self.shape) + len(shape) for dim in self.dims)


def _fields(batch: Any, shard_dims: ShardDims, axes: int) -> list[_Field]:
    """The fields that are split by themselves along spatial dims, and are no map of another."""
    found: set[_Field] = set()
    for x in leaves_of(batch):
        if isinstance(x, Tensor | LocalPart):
            dtype = x.tensor.dtype if isinstance(x, LocalPart) else x.dtype
            dims = dims_of(shard_dims, "", len(x.shape), dtype, axes)
            chosen = (dims,) if isinstance(dims, int) else tuple(dims or ())
            chosen = tuple(d if d >= 0 else d + len(x.shape) for d in chosen)
            if chosen and min(chosen) >= 2 and max(chosen) < len(x.shape):
                found.add(_Field(tuple(x.shape), chosen))
    return [
        f
        for f in found
        if not any(len(g.shape) > len(f.shape) and g.has_map(f.shape) for g in found)
    ]


def _split(x: Tensor | LocalPart, mesh: DeviceMesh, dims: Dims, what: str) -> Tensor:
    if isinstance(x, DomainTensor):
        return x
    chosen, ndim = [dims] if isinstance(dims, int) else list(dims), len(x.shape)
    if any(not -ndim <= d < ndim for d in chosen):
        raise ValueError(
            f"shard_dims {chosen} of {what} must lie in its shape {tuple(x.shape)}; name dims "
            f"from 0 to {ndim - 1}."
        )
    if isinstance(x, LocalPart):
        return x.split(mesh, dims)
    return shard(x, mesh, dims)


def _entries(batch: Any) -> dict[str, Any]:
    if is_graph(batch):
        return entries_of(batch)
    if is_record(batch):
        return fields_of(batch)
    if is_mapping(batch):
        return {str(key): value for key, value in batch.items()}
    if is_list(batch):
        return {str(i): value for i, value in enumerate(batch)}
    return {"0": batch}


def _rebuild(batch: Any, entries: dict[str, Any]) -> Any:
    """A collection of the type of `batch` with other values."""
    if is_graph(batch):
        return with_entries(batch, entries)
    if is_record(batch):
        return with_fields(batch, entries)
    if is_mapping(batch):
        rebuilt = copy.copy(batch)
        rebuilt.update({key: entries[str(key)] for key in batch})  # pyright: ignore[reportAttributeAccessIssue]
        return rebuilt
    if is_list(batch):
        values = list(entries.values())
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return entries["0"]
