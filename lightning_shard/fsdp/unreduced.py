"""Follows the gradients that `no_sync` leaves on each rank, until a backward pass reduces them.

FSDP2 keeps those of shards where `zero_grad` does not see them. So a shard gets a gradient of zeros
meanwhile: once that is taken away or written, the gradients of the rank are no longer wanted.
"""

import weakref
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_shard.processes.torch_private.internals import version_of


class Unreduced:
    """The parameters whose gradients are those of this rank, with what `.grad` was then."""

    def __init__(self) -> None:
        """Begin without any."""
        self._noted: dict[Tensor, tuple[Any, int]] = {}  # a weak reference, and its version

    def note(self, parameter: Tensor) -> None:
        """Remember that the gradient of this parameter is not reduced."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self._noted[parameter] = weakref.ref(parameter.grad), version_of(parameter.grad)

    def forget(self, parameters: Iterable[Tensor] | None = None) -> None:
        """These parameters, or all, have been reduced."""
        for p in [*self._noted] if parameters is None else parameters:
            self._noted.pop(p, None)

    @contextmanager
    def set_aside(self, parameters: Collection[Tensor]) -> Generator[None]:
        """Inside, none of these is remembered; afterwards those are that were so before."""
        kept = {p: self._noted.pop(p) for p in parameters if p in self._noted}
        yield
        self.forget(parameters)
        self._noted.update(kept)

    def takes_zeroed(self, parameter: Tensor) -> bool:
        """Return True, once, if the gradient that waited was taken away, or written."""
        is_zeroed = parameter in self._noted and not self._waits(parameter)
        if is_zeroed:
            del self._noted[parameter]
        return is_zeroed

    def wait(self, parameters: Iterable[Tensor]) -> bool:
        """Return True if a gradient of these waits to be reduced."""
        return any(self._waits(p) for p in parameters)

    def _waits(self, parameter: Tensor) -> bool:
        if parameter not in self._noted or parameter.grad is None:
            return False
        gradient, version = self._noted[parameter]
        return gradient() is parameter.grad and version == version_of(parameter.grad)
