"""Adaptive max pooling lays the windows side by side, so that torch's own function pools them.

Among equal maxima torch takes the first in the order of the global image. The ranks together take
the same one, because they compare the indices.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import all_gather_small, one_factor
from lightning_shard.domain.cache import made_once
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.fetch import Span
from lightning_shard.domain.layout import Factor
from lightning_shard.domain.memory_format import selected
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import cast_for, of_one
from lightning_shard.ops.registry import implements
from lightning_shard.ops.window.adaptive_pool import fetched_windows, output_sizes, window
from lightning_shard.ops.window.pool import unflat

MAX = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
WITH_INDICES: tuple[Callable[..., Any], ...] = (
    F.adaptive_max_pool1d_with_indices, F.adaptive_max_pool2d_with_indices,
    F.adaptive_max_pool3d_with_indices,
)  # fmt: skip
SPATIAL_DIMS: dict[Callable[..., Any], int] = {
    torch.adaptive_max_pool1d: 1,
    **{f: n for n, f in enumerate(MAX, 1)}, **{f: n for n, f in enumerate(WITH_INDICES, 1)},
}  # fmt: skip


@implements(*MAX)
def adaptive_max_pool(
    func: Callable[..., Any],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    output_size: Any,
    return_indices: bool = False,
) -> Any:
    """Maxima of adaptive windows; rows under a rank's own windows travel."""
    return adaptive_max_pool_with_indices(func, input, output_size)[0]


@implements(torch.adaptive_max_pool1d, *WITH_INDICES)
def adaptive_max_pool_with_indices(
    func: Callable[..., Any],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    output_size: Any,
    return_indices: bool = True,
) -> tuple[Any, Any]:
    """Maxima of adaptive windows and their places; rows under own windows travel."""
    n = SPATIAL_DIMS[func]
    (x,) = cast_for(of_one(func, 1), input)
    numbers: dict[int, Tensor] = {}  # global numbers of the rows that are side by side
    shared: list[int] = []  # mesh axes over which all ranks pool for all output rows
    layout = x.layout
    for dim, size in enumerate(output_sizes(x, n, output_size), x.ndim - n):
        layout = layout.with_dim(dim, size)
        if axes := x.layout.axes(dim):
            x, numbers[dim] = _side_by_side(one_factor(x, dim), dim, size)
            layout = layout.with_dims({dim: x.layout.dims[dim]})
            shared += [] if layout.axes(dim) else axes
    if 0 in layout.local_shape:
        values = empty_attached(layout.local_shape, x.local, is_curved=True)
        indices = values.detach().long()
    else:
        values, places = WITH_INDICES[n - 1](x.local, layout.local_shape[-n:])
        indices = _global_indices(places, x.local.shape[-n:], input.shape[-n:], numbers, x.ndim - n)
    if shared:
        values, indices = _first_of_all(x, tuple(sorted(shared)), values, indices)
    if not layout.split_dims:
        return values, indices
    return x.like(values, layout), x.like(indices, layout)


def _side_by_side(x: Subdomain, dim: int, output: int) -> tuple[Subdomain, Tensor]:
    """The rows of the windows one after the other, equally many of each; their global rows.

    A window without rows here gets one of minus infinity, numbered beyond the last.
    """
    ((factor,), grid) = x.layout.dims[dim], x.layout.grid
    if output < grid.parts(factor.axes):
        span, outputs = factor.bounds(grid), (0, output)
        x = x.like(x.local, x.layout.with_dims({dim: (Factor(output),)}))
    else:
        x, span, outputs = fetched_windows(x, dim, output)
    places, numbers = _places(factor.extent, output, span, outputs, x.local.device)
    after = [0, 0] * (x.ndim - dim - 1) + [0, 1]
    padded = F.pad(x.local, after, value=-math.inf)
    return x.like(selected(padded, dim, places)), numbers


@made_once
def _places(
    extent: int, output: int, span: Span, outputs: Span, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The places among rows `span` of the rows in each window, and the global rows there."""
    low, high = span
    windows: list[Sequence[int]] = []
    for row in range(*outputs):
        start, end = window(row, extent, output)
        windows.append(range(max(start, low), min(end, high)) or [high])
    most = max(map(len, windows), default=0)
    rows = [*itertools.chain.from_iterable([*w, *[w[-1]] * (most - len(w))] for w in windows)]
    places = torch.tensor([row - low for row in rows], dtype=torch.long, device=device)
    numbers = [row if row < high else extent for row in rows]
    return places, torch.tensor(numbers, dtype=torch.long, device=device)


def _global_indices(
    places: Tensor,
    local: tuple[int, ...],
    extents: tuple[int, ...],
    numbers: dict[int, Tensor],
    first: int,
) -> Tensor:
    """Flat places in rows side by side as flat places in the image, or one beyond its last."""
    indices, outside = torch.zeros_like(places), torch.zeros_like(places, dtype=torch.bool)
    for dim, (row, extent) in enumerate(zip(unflat(places, local), extents, strict=True), first):
        row = numbers[dim][row] if dim in numbers else row
        indices = indices * extent + row
        outside |= row >= extent
    return indices.where(~outside, math.prod(extents))


def _first_of_all(
    x: Subdomain, axes: tuple[int, ...], values: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """The largest of the ranks' values; the first of equals, and the last that is NaN."""
    values, indices = all_gather_small(x, axes, values), all_gather_small(x, axes, indices)
    best = values.detach().amax(0)
    order = indices.where(values == best, torch.iinfo(indices.dtype).max)
    rank = torch.where(values.isnan(), -indices - 1, order).argmin(0, keepdim=True)
    return values.gather(0, rank)[0], indices.gather(0, rank)[0]
