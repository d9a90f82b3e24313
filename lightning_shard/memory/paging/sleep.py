"""Tells for how long a device needs no pager: while its tiles take little of their budget.

A pager that sees every operator takes as much of the host's time as a step in tiles does. Fields
that fit do not need it. So it sleeps until the tiles hold half of the budget. The tensors that they
have made by then are not known to the pager, and stay on the device until they are freed.
"""

import torch

SHARE = 2  # a pager sleeps until this part of its budget is taken
CAUTION = 4  # an operation may take this many times the bytes of its result


class Sleep:
    """Sleeps until the tiles of a device hold a share of their budget.

    The device's allocator is asked only when what was made since the last time could be too much.

    Args:
        device: The device, whose allocator tells what it has given out.
        budget: The bytes that the tiles may have there, beside what is there now.
    """

    def __init__(self, device: torch.device, budget: int) -> None:
        self._device, self._limit = device, budget // SHARE
        self._before = allocated_on(device) or 0
        self._held = self._made = 0

    def note(self, count: int) -> None:
        """Note the bytes of what an operation has made."""
        self._made += count

    def is_over(self, reads: int) -> bool:
        """Return True if the tiles hold too much, or are about to; then nobody asks again."""
        if self._held + CAUTION * self._made + reads < self._limit:
            return False
        self._held, self._made = self.held(), 0
        return self._held + reads >= self._limit

    def held(self) -> int:
        """Return the bytes that are on the device, beside what was there before."""
        return (allocated_on(self._device) or 0) - self._before


def allocated_on(device: torch.device) -> int | None:
    """Return the bytes that a device's allocator has given out; None where it does not tell."""
    try:
        return torch.accelerator.memory_allocated(device)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
