"""Computes relative differences of named values, and how much of them rounding explains."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_shard.lab.seen import Value
from lightning_shard.processes.torch_private.typed import linalg

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of a loss, a gradient or an output
NARROW = 5e-2  # for narrower dtypes
NEGLIGIBLE = 1e-3  # a parameter's share of the gradient below which it is compared with that share


def differences(
    found: Mapping[str, Value], expected: Mapping[str, Value], total: float = 0.0
) -> dict[str, float]:
    """The relative difference of each value from the expected one, the largest first.

    Args:
        found: Values by name; one that is missing differs without bound.
        expected: The values of one process.
        total: The norm of all of them, if a small part of it is negligible.
    """
    every = {
        name: _difference(found[name], value, NEGLIGIBLE * total) if name in found else torch.inf
        for name, value in expected.items()
    }
    every |= {name: torch.inf for name in found if name not in expected}
    return dict(sorted(every.items(), key=lambda item: -item[1]))


def tolerance_of(values: Mapping[str, Value]) -> float:
    """The largest relative difference that rounding of these values explains."""
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    dtypes = {value.dtype for value in tensors if value.is_floating_point()}
    return max(TOLERANCE.get(dtype, NARROW) for dtype in dtypes | {torch.float64})


def norm(x: Tensor) -> float:
    """The 2-norm, summed in float64."""
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    return float(linalg.vector_norm(wide))


def _difference(found: Value, expected: Value, floor: float) -> float:
    if isinstance(found, str) or isinstance(expected, str):
        return 0.0 if found == expected else torch.inf
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    if found.shape != expected.shape:
        return torch.inf
    alike = (found.isnan() & expected.isnan()) | (found == expected)  # also infinities
    gap = torch.where(alike, 0, found - expected) if found.dtype != torch.bool else ~alike
    scale = torch.where(expected.isnan(), 0, expected) if expected.dtype != torch.bool else expected
    return norm(gap) / max(norm(scale), floor, 1e-30)
