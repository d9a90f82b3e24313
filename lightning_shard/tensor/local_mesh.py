"""Stands in the place of a device mesh where all parts of a field are in one process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class LocalMesh(ABC):
    """Splits fields into parts that one process holds: the tiles of a device.

    Attributes:
        ndim: The number of its axes, each of which splits a dim of a field.
    """

    ndim: int

    @abstractmethod
    def cut(self, tensor: Tensor, dims: int | Sequence[int]) -> Any:
        """Return the field of a whole tensor, whose `dims` are split."""

    @abstractmethod
    def cut_by(
        self,
        shape: Sequence[int],
        dims: int | Sequence[int],
        read: Callable[[tuple[slice, ...]], Tensor],
    ) -> Any:
        """Return the field of this shape; `read` gives the rows of each part."""


class LocalField(Tensor):
    """Holds all parts of a field in this process."""

    @property
    def split_dims(self) -> tuple[int, ...]:
        """The dims along which it is split."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """Return the whole tensor; differentiable."""
        raise NotImplementedError
