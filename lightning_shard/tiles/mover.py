"""Names the functions by which the tiles ask for their tensors to be moved."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Mover(Protocol):
    """Moves what tiles hold between a device and other memory."""

    @property
    def sleeps(self) -> bool:
        """True while all tensors stay where they are."""
        ...

    def seeing(self, reads: int = 0) -> AbstractContextManager[Any]:
        """Return a context in which it sees each operator, unless it still sleeps.

        Args:
            reads: The bytes of what will be read, about as many as will be made.
        """
        ...

    def note_made(self, count: int) -> None:
        """Note the bytes of what an operation has made for all tiles."""
        ...

    def on_host(self, values: Any) -> AbstractContextManager[Any]:
        """Return a context that gives tensors of the device as tensors of the host."""
        ...

    def stay(self, *tensors: torch.Tensor) -> None:
        """Bring tensors, and never move them again."""
        ...
