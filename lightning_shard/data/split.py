"""Finds the dims of batch entries that a domain splits, and keeps this rank's part of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.data.file_field import FileField
from lightning_shard.data.local import LocalPart
from lightning_shard.data.tree import entries_of, is_graph, leaves_of, map_leaves, with_entries
from lightning_shard.domain.layout import listed_dims
from lightning_shard.tensor.calls import name_makers
from lightning_shard.tensor.local_mesh import LocalMesh
from lightning_shard.tensor.placement import is_field, shard, shard_alike

_WHOLE = (Tensor, LocalPart, FileField)
Dims = int | Sequence[int]
ShardDims = Dims | Mapping[str, Dims | None] | None


def shard_batch(batch: Any, mesh: DeviceMesh | LocalMesh, shard_dims: ShardDims = None) -> Any:
    """Split the fields of `batch` over the domain mesh; all else stays whole on every rank.

    Args:
        batch: Nested dicts, lists, tuples and dataclasses of tensors, equal on all ranks of the
            domain, or of parts that each rank has read for itself (`LocalPart`).
        mesh: The domain mesh, of one or several axes; or tiles of this process.
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
    split = _split_entries(batch, mesh, shard_dims)
    name_makers((x for x in leaves_of(split) if isinstance(x, Tensor) and is_field(x)), "the batch")
    return split


def _split_entries(batch: Any, mesh: DeviceMesh | LocalMesh, shard_dims: ShardDims) -> Any:
    if not isinstance(shard_dims, Mapping):
        leaves = [x for x in leaves_of(batch) if isinstance(x, _WHOLE) and _has_rows(x)]
        return _Splitter(mesh, shard_dims, _fields(leaves, shard_dims, mesh.ndim)).split(batch, "")
    splitter = _Splitter(mesh, shard_dims)
    held = entries_of(batch)
    entries = {"0": batch} if held is None else held
    names = [str(key) for key in entries]
    if missing := [key for key in shard_dims if str(key) not in names]:
        raise ValueError(
            f"shard_dims names the batch entry {missing[0]!r}, but the batch has "
            f"{names}; use one of these."
        )
    split = {key: splitter.split(entry, str(key)) for key, entry in entries.items()}
    return split["0"] if held is None else with_entries(batch, split)


def dims_of(
    shard_dims: ShardDims, entry: str, ndim: int, dtype: torch.dtype, axes: int
) -> Dims | None:
    """Find the dims of a batch entry that so many axes of a domain split; None: it stays whole."""
    if isinstance(shard_dims, Mapping):
        return next((dims for name, dims in shard_dims.items() if str(name) == entry), None)
    if not dtype.is_floating_point or ndim < 3 or (shard_dims is None and ndim < 2 + axes):
        return None
    return tuple(range(2, 2 + axes)) if shard_dims is None else shard_dims


def split_dims(shard_dims: ShardDims) -> tuple[int, ...] | None:
    """Find the dims along which all named fields are split, from the front; None: not known.

    Raises:
        ValueError: They are no whole numbers.
    """
    named = list(shard_dims.values()) if isinstance(shard_dims, Mapping) else [shard_dims]
    chosen = {listed_dims(d, "shard_dims") for d in named if d is not None}
    dims = chosen.pop() if len(chosen) == 1 else ()
    return dims if dims and min(dims) >= 0 else None


class _Field(NamedTuple):
    """A field (B, C, *spatial) that is split along spatial dims."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    def has_map(self, shape: Sequence[int]) -> bool:
        """Return whether `shape` is (B, *spatial), or (B, any, *spatial), of this field."""
        spatial = self.shape[2:]
        without_channels = tuple(shape[1:]) == spatial
        same_dims = len(shape) == len(self.shape) and tuple(shape[2:]) == spatial
        return tuple(shape[:1]) == self.shape[:1] and (without_channels or same_dims)

    def dims_of_map(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the dims of a map of `shape` that are split as those of the field are."""
        return tuple(dim - len(self.shape) + len(shape) for dim in self.dims)


def _fields(
    leaves: Iterable[Tensor | LocalPart | FileField], shard_dims: ShardDims, axes: int
) -> tuple[_Field, ...]:
    """Find the fields that are split along spatial dims, and are not the map of another field."""
    found: set[_Field] = set()
    for x in leaves:
        dims = dims_of(shard_dims, "", len(x.shape), x.dtype, axes)
        chosen = () if dims is None else listed_dims(dims, "shard_dims")
        chosen = tuple(d if d >= 0 else d + len(x.shape) for d in chosen)
        if chosen and min(chosen) >= 2 and max(chosen) < len(x.shape):
            found.add(_Field(tuple(x.shape), chosen))
    return tuple(
        f
        for f in found
        if not any(len(g.shape) > len(f.shape) and g.has_map(f.shape) for g in found)
    )


@dataclass(frozen=True)
class _Splitter:
    """Splits the entries of one batch.

    Attributes:
        mesh: The domain mesh.
        shard_dims: See `shard_batch`.
        fields: The fields that are split, whose maps are split with them.
    """

    mesh: DeviceMesh | LocalMesh
    shard_dims: ShardDims
    fields: tuple[_Field, ...] = ()

    def split(self, entry: Any, key: str) -> Any:
        """Split the tensors and graphs in an entry that the batch has under `key`."""

        def leaf(x: Any) -> Any:
            if isinstance(x, _WHOLE):
                return self._tensor(x, key)
            named = not isinstance(self.shard_dims, Mapping) or self._dims(key) is not None
            return self._graph(x) if named and is_graph(x) else x

        return map_leaves(leaf, entry, is_leaf=is_graph)

    def _dims(self, key: str) -> Dims | None:
        return dims_of(self.shard_dims, key, 0, torch.float32, self.mesh.ndim)

    def _tensor(self, x: Tensor | LocalPart | FileField, key: str) -> Tensor:
        what = f"batch entry {key!r}" if key else "a batch entry"
        if isinstance(x, Tensor) and not _has_rows(x):
            if self._dims(key) is None or not isinstance(self.shard_dims, Mapping):
                return x
            raise ValueError(
                f"shard_dims names {what}, but no rows can be cut out of a sparse or nested "
                "tensor; make it dense (x.to_dense(), torch.nested.to_padded_tensor), or leave it "
                "out."
            )
        dims = dims_of(self.shard_dims, key, len(x.shape), x.dtype, self.mesh.ndim)
        if dims is None or (self.shard_dims is None and not isinstance(x, LocalPart)):
            maps = (f.dims_of_map(x.shape) for f in self.fields if f.has_map(x.shape))
            dims = next(maps, dims)
        if dims is not None:
            return _split(x, self.mesh, dims, what)
        if isinstance(x, FileField):
            return x.tensor
        if isinstance(x, LocalPart):
            raise ValueError(
                f"{what} of shape {tuple(x.shape)} was read in parts, but shard_dims leaves it "
                "whole; give slab_of the key under which the batch has it."
            )
        return x

    def _graph(self, graph: Any) -> Any:
        """Split what has a row for each node or edge: all mesh axes split its rows."""
        found: dict[str, Any] = {}
        for key, value in (entries_of(graph) or {}).items():
            if isinstance(value, Tensor) and (graph.is_node_attr(key) or graph.is_edge_attr(key)):
                dim = int(graph.__cat_dim__(key, value)) % value.ndim
                axes = (dim,) * self.mesh.ndim
                found[key] = _split(value, self.mesh, axes, f"the graph's {key!r}")
        return with_entries(graph, found)


def _has_rows(x: Tensor | LocalPart | FileField) -> bool:
    """Return whether rows can be cut out of it: not out of a sparse or nested tensor."""
    if isinstance(x, LocalPart | FileField) or is_field(x):
        return True
    return x.layout is torch.strided and not x.is_nested


def _split(
    x: Tensor | LocalPart | FileField, mesh: DeviceMesh | LocalMesh, dims: Dims, what: str
) -> Tensor:
    if is_field(x):
        assert isinstance(x, Tensor)
        return x
    chosen, ndim = [*listed_dims(dims, "shard_dims")], len(x.shape)
    if any(not -ndim <= d < ndim for d in chosen):
        raise ValueError(
            f"shard_dims {chosen} of {what} must lie in its shape {tuple(x.shape)}; name dims "
            f"from 0 to {ndim - 1}."
        )
    if isinstance(x, FileField):
        assert isinstance(mesh, LocalMesh)  # nobody else is given one
        return x.split(mesh, dims)
    if isinstance(x, LocalPart):
        if isinstance(mesh, LocalMesh):
            raise ValueError(f"{what} was read in parts, of which one process reads one.")
        return x.split(mesh, dims)
    if isinstance(mesh, LocalMesh):
        return shard(x, mesh, dims)
    return shard_alike(x, mesh, dims)
