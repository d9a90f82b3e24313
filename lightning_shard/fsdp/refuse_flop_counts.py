"""Refuses to count floating-point operations inside of a step whose samples are split.

A rank computes its rows, some of them twice where neighbours need them, and whole whatever is not
split: neither its own number nor the sum over the ranks is that of one process.
"""

import functools
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.ops.elementwise.whole_gradients import splits_samples


@functools.cache
def refuse_flop_counts() -> None:
    """Let `FlopCounterMode` refuse to begin inside of such a step, from now on."""
    begin = FlopCounterMode.__enter__

    @functools.wraps(begin)
    def checked(self: FlopCounterMode) -> Any:
        if splits_samples():
            raise UnsupportedOperationError(
                "FlopCounterMode in a step whose samples are split over ranks: it would count the "
                "rows of this rank; count the same batch in one process instead"
            )
        return begin(self)

    FlopCounterMode.__enter__ = checked
