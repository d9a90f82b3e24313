"""Finds loops of Fabric in which ranks of one domain compute different things with a batch."""

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.domain.subdomain import domain_of
from lightning_shard.tensor.calls import counted_calls
from lightning_shard.trainer.same_steps import SameSteps


class SameLoop(SameSteps):
    """Compares what ranks that share samples do between one batch and the next.

    Steps have no other beginning and end in a loop of the user's own.
    """

    def begin_loop(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Begin to compare.

        Args:
            mesh: The ranks that share samples.
            device: The device of this rank's collectives.
        """
        self._mesh, self._device = mesh, device
        self.begin(domain_of(mesh).ranks)

    def batches(self, batches: Iterator[Any]) -> Generator[Any]:
        """Yield batches; compare after the first one, and at the end."""
        is_first = True
        for batch in batches:
            before = counted_calls.get()
            counted_calls.set(self._calls if self._is_shared else before)
            try:
                yield batch
            finally:  # a loop that was left ends when it is collected, perhaps within another one
                if counted_calls.get() is self._calls:
                    counted_calls.set(before)
                self._calls.reads_numbers = False
            if is_first:
                self._compare_domain()
            is_first = False
        self._compare_domain()

    def backward(self, outputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Add the loss of a backward pass, if it is that of a batch."""
        of_batch = counted_calls.get() is self._calls and len(outputs) == 1
        return self.one_backward(outputs[0]) if of_batch else nullcontext()

    def _compare_domain(self) -> None:
        if self._is_shared and threading.current_thread() is threading.main_thread():
            domain = domain_of(self._mesh)
            group = domain.group(tuple(range(self._mesh.ndim)))
            self.compare(self._device, [0] * self._mesh.size(), group)
