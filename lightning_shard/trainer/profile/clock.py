"""Sets the clocks of all ranks against that of rank 0.

No rank leaves a sum over ranks before each has entered it. So between the entry of one rank and the
exit of another lies a time that is not negative, whatever their clocks say. Each sum bounds the
difference of two clocks from both sides; the narrowest bounds of some sums are kept. Within them
the difference nearest to zero is taken, which is right for ranks of one node, and for nodes whose
clocks are set over the network.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

ROUNDS = 24


@dataclass(frozen=True)
class Clock:
    """What this rank's clock shows, in ns.

    Attributes:
        begin: When the comparison began, by rank 0's clock; the same number on all ranks.
        ahead: By how much this rank's clock is ahead of rank 0's.
        accuracy: By how much this can be wrong, on the rank where it is worst.
    """

    begin: int
    ahead: int = 0
    accuracy: int = 0


def compare_clocks(device: torch.device) -> Clock:
    """Compare the clocks of all ranks of the default group; all must call it.

    Args:
        device: Of the tensors that the group carries.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Clock(time.time_ns())
    stamps: list[list[int]] = []
    for _ in range(ROUNDS):
        before = time.time_ns()
        one = torch.ones(1, device=device)
        dist.all_reduce(one)
        one.item()  # waits for the device
        stamps.append([before, time.time_ns()])
    mine = torch.tensor([stamps], device=device)
    table = mine.new_empty(dist.get_world_size(), *mine.shape[1:])
    dist.all_gather_into_tensor(table, mine)
    clocks = [_bounds(row, table[0].tolist()) for row in table.tolist()]
    ahead = [_nearest_to_zero(low, high) for low, high in clocks]
    wrong = [max(high - a, a - low, 0) for (low, high), a in zip(clocks, ahead, strict=True)]
    return Clock(int(table[0, 0, 0]), ahead[dist.get_rank()], max(wrong[1:]))


def _bounds(mine: list[list[int]], first: list[list[int]]) -> tuple[int, int]:
    """Between which differences this rank's clock is ahead of the first's."""
    pairs = list(zip(mine, first, strict=True))
    low = max(before - first_after for (before, _), (_, first_after) in pairs)
    high = min(after - first_before for (_, after), (first_before, _) in pairs)
    return min(low, high), max(low, high)  # crossed where a clock was set meanwhile


def _nearest_to_zero(low: int, high: int) -> int:
    return min(max(low, 0), high)
