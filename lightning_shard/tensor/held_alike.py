"""Compares tensors that the ranks of a domain hold whole: parts of others would make up no field.

The ranks tell each other shape, dtype and some of the values, which takes as long as a reduction of
one number, whatever the size of the tensor. Values may differ by rounding, as those that ranks have
computed do.
"""

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_shard.domain.subdomain import Domain
from lightning_shard.processes.torch_private.internals import FakeTensor, in_transform
from lightning_shard.tensor.tensor import DomainTensor

COMPARED = 64  # values of each tensor
ROUNDING = 1e-6  # the least difference, as a share of the largest value, that is told


def are_alike(facts: Sequence[object], domain: Domain) -> bool:
    """Return whether these facts are written the same on all ranks, which all call."""
    if math.prod(domain.grid.sizes) == 1:
        return True
    mark = zlib.crc32(repr(facts).encode())  # it has the same size on all ranks
    found = domain.gathered(torch.tensor(mark, device=device_of(domain)))
    return bool((found == found[0]).all())


def first_different(tensors: Sequence[Tensor], domain: Domain) -> int | None:
    """Return the number of the first tensor whose values differ. All ranks call this.

    Args:
        tensors: The tensors, of the same shapes and dtypes on each rank.
        domain: The ranks.

    Returns:
        The number; None if all have the same values.
    """
    if math.prod(domain.grid.sizes) == 1 or not tensors:
        return None
    with torch.no_grad():
        own = torch.stack([_some_values(x) for x in tensors]).to(device_of(domain))
        found = domain.gathered(own).cpu()
    if bool((found == found[0]).all()):
        return None
    apart = gap_of(found, found[0])
    scale = torch.where(found.isfinite(), found, 0).abs().amax((0, 2))
    bounds = torch.tensor([_rounding_of(x.dtype) for x in tensors], device="cpu") * scale
    differ = ~(apart.abs() <= bounds[:, None]).all(2).all(0)
    return int(differ.nonzero()[0]) if differ.any() else None


def gap_of(found: Tensor, expected: Tensor) -> Tensor:
    """Return the difference of two tensors; 0 where both are NaN, or the same infinity."""
    same = (found.isnan() & expected.isnan()) | (found == expected)
    return torch.where(same, 0, found - expected) if found.dtype != torch.bool else ~same


def device_of(domain: Domain) -> torch.device:
    """Return the device whose tensors the ranks exchange."""
    return torch.device(domain.mesh.device_type)


def _some_values(x: Tensor) -> Tensor:
    """Return a fixed number of values, spread evenly; zeros stand for those that cannot be read."""
    found = torch.zeros(2 * COMPARED, device="cpu")
    unread = isinstance(x, DomainTensor | FakeTensor) or x.is_meta or in_transform()
    if unread or x.layout is not torch.strided or x.is_nested or not x.numel():
        return found
    count = min(COMPARED, x.numel())
    places = torch.arange(count, device="cpu") * x.numel() // count
    values = x.detach()[torch.unravel_index(places.to(x.device), x.shape)] if x.ndim else x.detach()
    values = values.as_subclass(Tensor).cpu()
    parts = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    flat = parts.flatten().to(torch.float32)
    found[: len(flat)] = flat
    return found


def _rounding_of(dtype: torch.dtype) -> float:
    """Return the relative difference that may come of sums in another order."""
    numbers = dtype.is_floating_point or dtype.is_complex
    return max(ROUNDING, torch.finfo(dtype).eps ** 0.5) if numbers else 0.0
