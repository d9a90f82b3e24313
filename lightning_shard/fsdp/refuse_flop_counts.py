"""Refuses to count floating-point operations inside of a step whose samples are split.

A rank computes its rows, some of them twice where neighbours need them, and whole whatever is not
split: neither its own number nor the sum over the ranks is that of one process.
"""

import functools
import warnings
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.ops.elementwise.whole_gradients import splits_samples

_WORDS = "FlopCounterMode in a step whose samples are split over ranks counts the rows of this rank"
_REMEDY = "count the same batch in one process instead"


@functools.cache
def refuse_flop_counts() -> None:
    """Let `FlopCounterMode` refuse to begin inside of such a step, from now on.

    Where no gradients are taken, as in evaluation, it warns: other numbers of the step are right.
    """
    begin = FlopCounterMode.__enter__

    @functools.wraps(begin)
    def checked(self: FlopCounterMode) -> Any:
        if splits_samples():
            if torch.is_grad_enabled():
                raise UnsupportedOperationError(f"{_WORDS}; {_REMEDY}")
            warnings.warn(
                f"{_WORDS}, so its number is not that of the batch; {_REMEDY}.", stacklevel=2
            )
        return begin(self)

    FlopCounterMode.__enter__ = checked
