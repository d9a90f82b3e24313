"""Stands for tensors on disk, which are read when they are asked for."""

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.processes.narrow import is_dict, is_list
from lightning_shard.processes.torch_private.internals import local_shape_and_offset

Region = tuple[slice, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is not read yet.

    Attributes:
        shape: Its whole shape.
        dtype: The dtype in the file.
        read: Gives the part in a region, one slice for each dim, in memory of its own or mapped.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[Region], Tensor]

    def whole(self) -> Tensor:
        """Read all of it, into memory of the CPU."""
        return self.read(tuple(slice(0, n) for n in self.shape))


class StoredState(MutableMapping[str, Any]):
    """A state dict that is read entry by entry; the values it gives are whole CPU tensors.

    Attributes:
        stored: The same with `StoredTensor`s.
    """

    def __init__(self, stored: dict[str, Any]) -> None:
        self.stored = stored

    def __getitem__(self, name: str) -> Any:
        value = self.stored[name]
        return value.whole() if isinstance(value, StoredTensor) else value

    def __setitem__(self, name: str, value: Any) -> None:
        self.stored[name] = value

    def __delitem__(self, name: str) -> None:
        del self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def own_region(tensor: Tensor) -> Region:
    """Find the part of the whole tensor that this rank holds: a slice for each dim."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    sizes, offsets = local_shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(low, low + n) for low, n in zip(offsets, sizes, strict=True))


def tensors_in(value: Any) -> list[Tensor | StoredTensor]:
    """Find all tensors in nested dicts, lists and tuples, read or not."""
    if isinstance(value, Tensor | StoredTensor):
        return [value]
    if isinstance(value, StoredState):
        value = value.stored
    items = list(value.values()) if is_dict(value) else value if is_list(value) else []
    return [tensor for item in items for tensor in tensors_in(item)]


def bytes_of(value: Any) -> int:
    """Count the bytes of all tensors in nested dicts, lists and tuples."""
    return sum(t.shape.numel() * t.dtype.itemsize for t in tensors_in(value))
