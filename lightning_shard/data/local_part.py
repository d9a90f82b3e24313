"""The part of a tensor that one rank has read by itself, in a batch, in place of the whole one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

from lightning_shard.processes.torch_private.internals import collate_functions
from lightning_shard.tensor.placement import from_local


@dataclass
class LocalPart:
    """Holds what one rank has read of a tensor, in place of the whole one.

    Attributes:
        tensor: This rank's rows.
        shape: The global shape.
        samples: Which samples they are of: the ranks of a domain must have read the same.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    samples: tuple[int, ...]

    def pin_memory(self) -> "LocalPart":
        return LocalPart(self.tensor.pin_memory(), self.shape, self.samples)

    def to(self, *args: Any, **kwargs: Any) -> "LocalPart":
        """Move or convert the rows, as a batch does that moves itself."""
        return LocalPart(self.tensor.to(*args, **kwargs), self.shape, self.samples)

    def split(self, mesh: DeviceMesh, dims: int | Sequence[int]) -> Tensor:
        return from_local(self.tensor, mesh, dims, self.shape)


def _collate(
    parts: Sequence[LocalPart], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None
) -> LocalPart:
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
