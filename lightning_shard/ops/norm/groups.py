"""Groups of values that share a mean and a variance, and these moments over all ranks.

A local tensor is (B, C, ...). Its C channels are K groups of neighbours; the values of a group
share their moments, along B too. Where each sample has moments of its own, the channels of all
samples are those of one: (1, B * C, rest).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.domain.align import all_gather_small, sum_over, volume
from lightning_shard.domain.cache import made_once
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.half import wide
from lightning_shard.domain.layout import Grid, Layout
from lightning_shard.domain.subdomain import Domain, Subdomain
from lightning_shard.domain.wire import reduce_in_place


@dataclass(frozen=True)
class Groups:
    """The values of a split tensor that share their moments.

    Attributes:
        layout: The layout of the split tensor.
        domain: Its process groups.
        dims: The dims of the split tensor along which values share moments.
        number: K, of this rank.
        count: Number of values that share them, over all ranks.
        eps: Is added to the variance.
    """

    layout: Layout
    domain: Domain
    dims: tuple[int, ...]
    number: int
    count: int
    eps: float

    def flat(self, x: Tensor) -> Tensor:
        """(B, C, ...) -> (1, B * C, rest) of several samples with moments of their own."""
        if x.shape[0] == 1 or 0 in self.dims:  # not len(x), which asks more of torch
            return x
        return x.reshape(1, self.channels_of(x), math.prod(x.shape[2:]))

    def channels_of(self, x: Tensor) -> int:
        """Count the channels of `flat(x)`."""
        return x.shape[1] if 0 in self.dims else x.shape[0] * x.shape[1]

    def view(self, x: Tensor) -> Tensor:
        """(B, C, ...), flat -> (B, K, C / K, rest)."""
        per_group = x.shape[1] // max(self.number, 1)
        return x.reshape(x.shape[0], self.number, per_group, math.prod(x.shape[2:]))

    @property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes along which ranks share moments."""
        return self.layout.axes(*self.dims)

    def placed(self, values: Tensor) -> Subdomain:
        """Show collectives, which ask for the ranks alone, the values of this rank."""
        return Subdomain(values, self.layout, self.domain)

    def of_channels(self, values: Tensor) -> Tensor:
        """(..., C) -> (..., K, C / K)."""
        per_group = values.shape[-1] // max(self.number, 1)
        return values.reshape(*values.shape[:-1], self.number, per_group)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each group over all ranks, as (1, K, 1, 1)."""
        mean, variance = self.combined(own_moments(self.view(wide(x))))
        return mean, variance

    def combined(self, own: Tensor) -> Tensor:
        """Mean and variance (2, ...) over all ranks from those of this rank's rows."""
        if not self.axes:
            return own
        return mixed(all_gather_small(self.placed(own), self.axes, own), self.weights(own))

    def weights(self, like: Tensor) -> Tensor | None:
        """Return the share of the values that each part has; None where all have the same."""
        shares = _shares(self.layout, self.dims)
        return None if len({*shares}) == 1 else _weights(shares, like.dtype, like.device)


class Joint:
    """The parts of a field that are normalized at once: that of a rank, or those of all tiles.

    Attributes:
        groups: The groups of each part, which share their moments.
        first: The groups of the first part, which tell what all have in common.
    """

    def __init__(self, groups: Sequence[Groups]) -> None:
        self.groups, self.first = groups, groups[0]

    @staticmethod
    def moments_of(parts: Sequence[Tensor]) -> Tensor:
        """Put the moments of n parts, (2, ...) each, together as `combined` takes them."""
        return parts[0] if len(parts) == 1 else torch.stack([*parts], 1).flatten(0, 1)

    def combined(self, own: Tensor) -> Tensor:
        """Mean and variance (2, ...) over all ranks from those of these n parts.

        Args:
            own: The means, then the variances, of the parts, (2 * n, ...).
        """
        if len(self.groups) == 1:
            return self.first.combined(own)
        each = torch.unflatten(own, 0, (2, len(self.groups))).transpose(0, 1)
        return mixed(each, self.first.weights(own))

    def added(self, sums: Sequence[Tensor]) -> Tensor:
        """Add each group's sums up over all values; what travels is written."""
        if len(sums) > 1:
            return torch.stack([*sums]).sum(0)
        if len(self.groups) > 1:
            return sums[0]
        axes = self.first.axes
        if axes and sums[0].numel():
            reduce_in_place(sums[0], dist.ReduceOp.SUM, self.first.domain.group(axes))
        return sums[0]

    def mean_of_all(self, sums: Sequence[Tensor]) -> Tensor:
        """Add each group's sum up over all values, and divide by their number."""
        total, first = sums[0], self.first
        if len(sums) > 1:
            total = torch.stack([*sums]).sum(0)
        elif total.numel():  # else there is no sample here: as little on the ranks that share it
            total = sum_over(first.placed(total), total, first.dims)
        return total / first.count


def own_moments(view: Tensor) -> Tensor:
    """Mean and variance (2, 1, K, 1, 1) of each group of this rank's rows."""
    if view.numel():
        variance, mean = torch.var_mean(view, (0, 2, 3), correction=0, keepdim=True)
        return torch.stack([mean, variance])
    zeros = view.sum((0, 2, 3), keepdim=True)  # they weigh nothing, and have a graph
    return torch.stack([zeros, zeros])


def mixed(parts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mix the moments of all values (2, ...) from those of their parts (n, 2, ...).

    Args:
        parts: Mean and variance of each part.
        weights: The share of the values that each part has; alike if None.
    """
    if not parts.numel():  # no group is here
        return parts.sum(0)
    if weights is None:
        # not by `var_mean`, whose mean of infinite variances is NaN
        both, spread = parts.mean(0), parts[:, 0].var(0, correction=0)
        if in_forward_mode():
            return torch.stack([both[0], both[1] + spread])
        both[1].add_(spread)
        return both
    weights = weights.view(-1, *[1] * (parts.ndim - 2))
    both = (weights.unsqueeze(1) * parts).sum(0)
    if in_forward_mode():
        spread = (weights * (parts[:, 0] - both[0]).square()).sum(0)
        return torch.stack([both[0], both[1] + spread])
    both[1].add_((weights * (parts[:, 0] - both[0]).square()).sum(0))
    return both


@made_once
def _weights(shares: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(shares, dtype=dtype, device=device)


@lru_cache(maxsize=4096)
def _shares(layout: Layout, dims: tuple[int, ...]) -> tuple[float, ...]:
    """Each rank's share of the elements along `dims`, for the ranks that split them in order."""
    grid, axes = layout.grid, layout.axes(*dims)
    counts: list[int] = []
    for place in itertools.product(*(range(grid.sizes[a]) for a in axes)):
        at = dict(zip(axes, place, strict=True))
        coord = tuple(at.get(a, c) for a, c in enumerate(grid.coord))
        shape = replace(layout, grid=Grid(grid.sizes, coord)).local_shape
        counts.append(math.prod(shape[d] for d in dims))
    total = max(volume(layout, dims), 1)
    return tuple([n / total for n in counts])


def groups_of(
    x: Subdomain, dims: tuple[int, ...], number: int, eps: float, parts: int = 1
) -> Groups:
    """Find the groups of values along `dims` of a split tensor.

    Args:
        x: The split tensor.
        dims: The dims along which values share moments.
        number: Number of groups of channels in this rank's tensor.
        eps: Is added to the variance.
        parts: Number of groups along `dims`.
    """
    return Groups(x.layout, x.domain, dims, number, volume(x.layout, dims) // parts, eps)
