"""Relative differences of values, and how much of them rounding explains."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_shard.processes.torch_private.typed import linalg
from lightning_shard.tensor.held_alike import gap_of

Value = Tensor | float | str

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # for a loss, a gradient or an output
NARROW = 5e-2  # the tolerance for narrower dtypes
NEGLIGIBLE = 1e-3  # a parameter's share of the gradient below which it is compared with that share


def differences(
    found: Mapping[str, Value], expected: Mapping[str, Value], total: float = 0.0
) -> dict[str, float]:
    """Return the relative difference of each value from the expected one, the largest first.

    Args:
        found: Values by name; one that is missing differs without bound.
        expected: The values of one process.
        total: The norm of all of them, if a small part of it is negligible.
    """
    every = {
        name: difference(found[name], value, NEGLIGIBLE * total) if name in found else torch.inf
        for name, value in expected.items()
    }
    every |= {name: torch.inf for name in found if name not in expected}
    return dict(sorted(every.items(), key=lambda item: -item[1]))


def tolerance_of(values: Mapping[str, Value]) -> float:
    """Return the relative difference that sums in another order make in values of these dtypes."""
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    numbers = [x for x in tensors if x.is_floating_point() or x.is_complex()]
    dtypes = {x.dtype.to_real() for x in numbers}
    return max(TOLERANCE.get(dtype, NARROW) for dtype in dtypes | {torch.float64})


def difference(found: Value, expected: Value, floor: float) -> float:
    """Return the relative difference of a value from the expected one.

    Args:
        found: The value.
        expected: The value of one process.
        floor: The least norm that the difference is compared with.
    """
    if isinstance(found, str) or isinstance(expected, str):
        return 0.0 if found == expected else torch.inf
    found, expected = torch.as_tensor(found, device="cpu"), torch.as_tensor(expected, device="cpu")
    if found.shape != expected.shape:
        return torch.inf
    scale = torch.where(expected.isnan(), 0, expected) if expected.dtype != torch.bool else expected
    return norm(gap_of(found, expected)) / max(norm(scale), floor, 1e-30)


def relative(gap: float, size: float) -> float:
    """Return a gap as a share of a size; a gap that is no number is endless."""
    return gap / max(size, 1e-30) if gap == gap else torch.inf


def difference_of_all(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the relative difference of all real or complex values together."""
    names = [n for n, v in expected.items() if v.is_floating_point() or v.is_complex()]
    gap = norm_of_all([gap_of(found[name], expected[name]) for name in names])
    finite = [torch.where(expected[name].isfinite(), expected[name], 0) for name in names]
    return relative(gap, norm_of_all(finite))


def norm(x: Tensor) -> float:
    """Return the 2-norm, summed in float64."""
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    return float(linalg.vector_norm(wide))


def norm_of_all(values: Iterable[Tensor]) -> float:
    """Return the 2-norm of all numbers in tensors."""
    return norm(torch.tensor([norm(value) for value in values], device="cpu"))
