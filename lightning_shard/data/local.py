"""Holds the part of a tensor that one rank has read by itself, in place of the whole tensor."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

from lightning_shard.data.not_yet import NotYetATensor
from lightning_shard.processes.torch_private.internals import collate_functions
from lightning_shard.tensor.placement import rows_from_local


@dataclass
class LocalPart(NotYetATensor):
    """Holds what one rank has read of a tensor, in place of the whole one.

    Numbers, other parts, and tensors that are alike for all rows of a split dim can be added to it,
    and multiply it: statistics (C, 1, 1) normalize it.

    Attributes:
        tensor: This rank's rows.
        shape: The global shape.
        samples: The identity of each sample, such as its number and its file; the ranks of a domain
            must have read the same ones.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    samples: tuple[Any, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows, and of the whole tensor."""
        return self.tensor.dtype

    def pin_memory(self) -> "LocalPart":
        """Return the part with its rows in pinned memory, as a DataLoader asks for it."""
        return LocalPart(self.tensor.pin_memory(), self.shape, self.samples)

    def to(self, *args: Any, **kwargs: Any) -> "LocalPart":
        """Move or convert the rows, as a batch does that moves itself."""
        return LocalPart(self.tensor.to(*args, **kwargs), self.shape, self.samples)

    def float(self) -> "LocalPart":
        """Return the part in float32."""
        return self.to(torch.float32)

    def double(self) -> "LocalPart":
        """Return the part in float64."""
        return self.to(torch.float64)

    def __add__(self, other: Any) -> "LocalPart":
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> "LocalPart":
        return self._with(other, operator.sub)

    def __mul__(self, other: Any) -> "LocalPart":
        return self._with(other, operator.mul)

    def __truediv__(self, other: Any) -> "LocalPart":
        return self._with(other, operator.truediv)

    def __radd__(self, other: Any) -> "LocalPart":
        return self._with(other, operator.add)

    def __rsub__(self, other: Any) -> "LocalPart":
        return self._with(other, lambda x, y: y - x)

    def __rmul__(self, other: Any) -> "LocalPart":
        return self._with(other, operator.mul)

    def _with(self, other: Any, operation: Callable[[Any, Any], Tensor]) -> "LocalPart":
        if isinstance(other, LocalPart) and other.shape == self.shape:
            return LocalPart(operation(self.tensor, other.tensor), self.shape, self.samples)
        if not isinstance(other, Tensor | Number):
            return NotImplemented
        sizes = tuple(other.shape) if isinstance(other, Tensor) else ()
        held = zip(reversed(sizes), reversed(self.shape), reversed(self.tensor.shape), strict=False)
        is_alike = all(n == 1 or n == whole == own for n, whole, own in held)
        if len(sizes) > len(self.shape) or not is_alike:
            raise TypeError(
                f"a batch entry of shape {tuple(self.shape)} was read in parts, of which this rank "
                f"has {tuple(self.tensor.shape)}, so a tensor of shape {sizes} does not fit it; "
                "compute with both in the step, or give it an extent of 1 along split dims."
            )
        return LocalPart(operation(self.tensor, other), self.shape, self.samples)

    def split(self, mesh: DeviceMesh, dims: int | Sequence[int]) -> Tensor:
        """Return the split tensor of which these rows are this rank's part.

        Raises:
            ValueError: The rows are not those that this rank has of a tensor of `shape`.
        """
        return rows_from_local(self.tensor, mesh, dims, self.shape)


def _collate(
    parts: Sequence[LocalPart], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None
) -> LocalPart:
    """Put the parts of several samples together, with the samples along a new first dim."""
    shapes = sorted({part.shape for part in parts})
    if len(shapes) > 1:
        raise ValueError(
            f"the fields of a batch must have one shape; got {shapes[0]} and {shapes[1]}. Use "
            "batch_size 1, or a dataloader for each shape."
        )
    samples = tuple(sample for part in parts for sample in part.samples)
    rows = default_collate([part.tensor for part in parts])
    return LocalPart(rows, (len(parts), *parts[0].shape), samples)


collate_functions()[LocalPart] = _collate
