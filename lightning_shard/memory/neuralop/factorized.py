"""Multiplies modes of split fields by factorized spectral weights (Tucker, CP, tensor train).

A rank multiplies its own modes: slicing a weight's modes slices one factor, so nothing is expanded
to the modes of other ranks. A factorized weight is also a sum over each of its inner dims r. Large
factors are split along r for good: each device multiplies all modes by its terms of the sum, and
the products are added up over devices. Modes then travel twice more (a gather and a
reduce-scatter), and the factors never.

In both ways the product is the layer's own contraction, of local tensors.
"""

import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_shard.domain.align import whole
from lightning_shard.domain.comm import all_reduce
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import scatter_sum
from lightning_shard.domain.subdomain import Domain, Subdomain
from lightning_shard.processes.device import device_of
from lightning_shard.tensor.tensor import DomainTensor

KINDS = ("tucker", "cp", "tt")


def kind_of(layer: Any) -> str | None:
    """Return the kind, one of `KINDS`, of the weight of a spectral convolution.

    It is None for a dense weight, or if the layer has a contraction that is not neuraloperator's.
    """
    kind = _kind(layer.weight)
    usual = str(getattr(layer.__dict__.get("_contract"), "__module__", "")).startswith("neuralop.")
    return kind if kind in KINDS and usual else None


def _kind(weight: Any) -> str:
    return str(getattr(weight, "name", "")).lower()


def contraction_of(layer: Any) -> Callable[..., Tensor]:
    """Return the layer's contraction of plain tensors, which never rebuilds the dense weight.

    It takes the factors in the order of least work, which is to reconstruct where that is cheaper.
    """
    own = layer.__dict__["_contract"]
    if not own.__name__.startswith("_contract_dense"):
        return own
    return sys.modules[own.__module__].get_contract_fun(layer.weight, "factorized", layer.separable)


def multiply(
    own: Callable[..., Tensor],
    x: Tensor,
    weight: Any,
    separable: bool,
    domain: Domain | None,
    summed: tuple[int, ...],
) -> Tensor:
    """Modes times a factorized weight.

    Args:
        own: The layer's contraction of plain tensors.
        x: Modes (B, C, k0, k1, ...), plain or split.
        weight: A factorized tensor of the modes' shape, with this rank's terms.
        separable: True for a layer without a sum over channels.
        domain: The ranks that hold other terms.
        summed: The mesh axes over which the terms are split.
    """
    if not isinstance(x, DomainTensor):
        y = own(x, weight, separable=separable)
        for axis in summed:
            assert domain is not None
            y = all_reduce(y, domain.group((axis,)))
        return y
    part = whole(x.subdomain, 1)
    split = {d: part.layout.axes(d) for d in part.layout.split_dims}
    gone = {d: axes for d, axes in split.items() if set(axes) & set(summed)}
    for d, axes in gone.items():
        if not set(axes) <= set(summed):
            raise UnsupportedOperationError(
                f"modes whose dim {d} is split over mesh axes {axes}, of which only some split the "
                "factors of the weight"
            )
        part = whole(part, d)
    y = _of_own_modes(own, part, weight, separable)
    for d, axes in gone.items():
        y = scatter_sum(y, d, axes)
    rest = [a for a in summed if not any(a in axes for axes in gone.values())]
    local = y.local
    for axis in rest:
        local = all_reduce(local, part.domain.group((axis,)))
    return DomainTensor(y.like(local)) if y.layout.split_dims else local


def _of_own_modes(
    own: Callable[..., Tensor], x: Subdomain, weight: Any, separable: bool
) -> Subdomain:
    channels = 1 if separable else 2
    bounds = [slice(*dim[0].bounds(x.layout.grid)) for dim in x.layout.dims[2:]]
    if any(x.layout.axes(d) for d in range(2, x.ndim)):
        weight = weight[(*[slice(None)] * channels, *bounds)]
    y = own(x.local, weight, separable=separable)
    return x.like(y, x.layout.with_dim(1, y.shape[1]))


def terms(weight: Any, parts: Sequence[int]) -> list[dict[str, int]]:
    """Choose for each mesh axis the dim of each parameter that is split over it.

    Parameters are named as in `weight.named_parameters()`. An axis may get none: a CP weight is one
    sum, and each rank must get a term.
    """
    factors = [f"factors.{key}" for key in weight.factors.keys]
    kind = _kind(weight)
    if kind == "tucker":
        sums = [{"core": i, factors[i]: 1} for i in (0, 1)]
    elif kind == "cp":
        sums = [{"weights": 0, **dict.fromkeys(factors, 1)}]
    else:
        sums = [{a: 2, b: 0} for a, b in pairwise(factors)]
    parameters = dict(weight.named_parameters())
    sums.sort(key=lambda split: -sum(parameters[name].numel() for name in split))
    found: list[dict[str, int]] = []
    for count in parts:
        fitting = [
            split
            for split in sums
            if split not in found
            and all(fills(parameters[n].shape[d], count) for n, d in split.items())
        ]
        found.append(fitting[0] if fitting else {})
    return found


def fills(extent: int, parts: int) -> bool:
    """Return True if `torch.chunk` leaves no part empty; FSDP2 cannot shard empty tensors."""
    return -(-extent // parts) * (parts - 1) < extent


def travels_less(weight: Any, device: str) -> bool:
    """Return True if modes of one sample take less time to send than the factors.

    FSDP2 sends factors three times a step, with others; of split terms it sends nothing within the
    domain, but modes of the sample travel four times, and FSDP2's collectives of the layer and the
    gradients of what is not split have a start of their own. The common factor (D - 1) / D is left
    out.

    Args:
        weight: The factorized weight, of shape (in, out, k0, k1, ...).
        device: Its type.
    """
    rates = device_of(device).rates
    factors = list(weight.parameters())
    into, out, *modes = weight.shape
    saved = 3 * sum(p.numel() * p.element_size() for p in factors)
    sent = 2 * 8 * (into + out) * math.prod(modes)
    return (saved - sent) * rates.send > (4 + 3 + len(factors)) * rates.start
