"""Finds the part of each sample that this rank reads, so that no rank reads the whole.

A dataset calls `slab_of` once, in the process that trains, reads `slab.index` of every sample, and
returns `slab.part(rows, sample)`. These stay with the part through collation, workers, pinned
memory and precision, until the strategy makes a `DomainTensor` of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.data.file_field import FileField, Read, as_tensor
from lightning_shard.data.local import LocalPart
from lightning_shard.data.split import Dims, ShardDims, dims_of
from lightning_shard.domain.layout import Layout, splits_of
from lightning_shard.domain.subdomain import domain_of


@dataclass(frozen=True)
class Slab:
    """The part of every sample's field that this rank reads.

    Attributes:
        shape: The shape of the whole field of one sample, without the batch dim.
        index: This rank's rows along each dim; it may hold none where ranks are more than rows.
        is_split: True if other ranks read other parts.
        is_by_tiles: True if each tile of this process will read its own rows.
    """

    shape: tuple[int, ...]
    index: tuple[slice, ...]
    is_split: bool
    is_by_tiles: bool = False

    def entry(self, read: Read, sample: Any, dtype: torch.dtype) -> Any:
        """Read the entry of a sample for a batch, or let tiles read it.

        Args:
            read: A function that reads the values at an index.
            sample: The identity of the sample, see `part`.
            dtype: The dtype to which values are converted.

        Raises:
            ValueError: They are complex, and the dtype is not.
        """
        if self.is_by_tiles:
            return FileField([read], self.shape, dtype)
        return self.part(as_tensor(read(self.index), dtype).to(dtype), sample)

    def part(self, rows: Tensor, sample: Any) -> Any:
        """Make the entry of a sample for a batch.

        Args:
            rows: The values at `index` of the sample's field.
            sample: The identity of the sample, alike on all ranks that have it: its number in the
                dataset, or a tuple of this and of its file. Ranks that read others are refused.
        """
        return LocalPart(rows, self.shape, (sample,)) if self.is_split else rows


def slab_of(
    trainer: Any,
    entry: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    shard_dims: ShardDims = None,
) -> Slab:
    """Find the part of each sample that this rank needs, by the mesh and `shard_dims`.

    Call it where the processes are there: in `setup` or a dataloader hook of a data module. The
    slab itself goes anywhere, also to workers.

    Args:
        trainer: The Trainer whose strategy splits the batch, or the domain mesh of a loop of your
            own. With None, or with a strategy that splits no sample, the slab is the whole field.
        entry: The key of the batch under which the field will be (the position, in a tuple).
        shape: The shape of the field of one sample, such as (C, H, W).
        dtype: The dtype of the field: by default only fields of floating point are split. Leave it
            out for classes (1, H, W) of the extents of another entry (C, H, W): these are split
            with it.
        shard_dims: With a mesh, the dims of batches that it splits, see `HybridShardStrategy`. A
            strategy has its own.

    Raises:
        ValueError: `shard_dims` names a dim that the field does not have, or that of the samples.
        TypeError: `dtype` is none of torch's.
        RuntimeError: The trainer has not started its processes yet.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, such as torch.float32; got {dtype!r}.")
    shape = tuple(shape)
    whole = Slab(shape, tuple(slice(0, n) for n in shape), is_split=False)
    if getattr(getattr(trainer, "strategy", None), "reads_by_tiles", False):
        return replace(whole, is_by_tiles=True)
    mesh: DeviceMesh | None = trainer if isinstance(trainer, DeviceMesh) else None
    strategy: Any = getattr(trainer, "strategy", None)
    # in tiles the first rank reads for all
    if getattr(strategy, "domain_size", 1) > 1 and not hasattr(strategy, "tiles"):
        if strategy.device_mesh is None:
            raise RuntimeError(
                f"which part of {entry!r} a rank reads is known once the trainer has started its "
                "processes; make the dataset in setup() of the data module, not before fit."
            )
        mesh, shard_dims = strategy.domain_mesh, strategy.shard_dims
    dims = dims_of(shard_dims, entry, 1 + len(shape), dtype, mesh.ndim) if mesh else None
    if mesh is None or dims is None:
        return whole
    return Slab(shape, _index(mesh, entry, shape, dims), is_split=True)


def _index(mesh: DeviceMesh, entry: str, shape: tuple[int, ...], dims: Dims) -> tuple[slice, ...]:
    grid = domain_of(mesh).grid
    splits = splits_of(1 + len(shape), grid.sizes, dims)
    if 0 in splits:
        raise ValueError(
            f"shard_dims {dims} of batch entry {entry!r} splits dim 0, the samples, of which no "
            "part can be read; name dims from 1 on, or use data_parallel_size to share samples out."
        )
    layout = Layout.of((1, *shape), splits, grid)
    return tuple(slice(*factor.bounds(grid)) for (factor,) in layout.dims[1:])
