"""Computes in float32 what torch computes so for half precision, and rounds once at the end.

Torch's kernels add up float16 and bfloat16 in float32. A rank's part of a sum that was rounded to
half precision may have overflowed though the result fits: the sum of 10,000 values of 10 is
infinite in float16, and their mean is not.
"""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> Tensor:
    """Return values of half precision in float32, others as they are."""
    return x.float() if x.dtype in HALF else x


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of values that are `wide`."""
    return torch.float32 if dtype in HALF else dtype
