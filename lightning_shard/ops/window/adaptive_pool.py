"""Adaptive averages: output row o covers input rows o * N // M up to ceil((o + 1) * N / M).

With at least as many output rows as ranks, each rank fetches the rows of its own output rows. With
fewer, each pools its own rows for every output row, the few results are combined, and the dim is
whole afterwards: a global pooling moves one number per channel, not the field.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import in_own_memory, one_factor, sum_over
from lightning_shard.domain.cache import made_once
from lightning_shard.domain.fetch import Span, fetch, needs_of
from lightning_shard.domain.half import wide_dtype
from lightning_shard.domain.layout import Factor
from lightning_shard.domain.memory_format import format_of, selected
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import cast_for, of_one, without_autocast
from lightning_shard.ops.registry import implements

AVERAGE = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


def output_sizes(x: Subdomain, n: int, output_size: Any) -> list[int]:
    """Resolve the output extents of the last `n` dims."""
    listed = [output_size] if isinstance(output_size, int) else output_size
    sizes: list[int | None] = list(listed)
    sizes = sizes * n if len(sizes) == 1 else sizes
    return [own if m is None else int(m) for m, own in zip(sizes, x.shape[-n:], strict=True)]


def window(output_row: int, extent: int, output: int) -> Span:
    """Return the input rows under one output row."""
    return output_row * extent // output, -(-(output_row + 1) * extent // output)


def fetched_windows(x: Subdomain, dim: int, output: int) -> tuple[Subdomain, Span, Span]:
    """Bring the rows under this rank's output rows; return the output's layout and both spans."""
    extent, layout = x.shape[dim], x.layout.with_dim(dim, output)
    (factor,) = layout.dims[dim]
    grid = layout.grid

    def spans(low: int, high: int) -> list[Span]:
        return [(window(low, extent, output)[0], window(high - 1, extent, output)[1])]

    low, high = factor.bounds(grid)
    rows = (
        fetch(x, dim, needs_of(output, grid.parts(factor.axes), spans)) if factor.axes else x.local
    )
    return x.like(rows, layout), spans(low, high)[0], (low, high)


@implements(*AVERAGE, joins=True)
def adaptive_avg_pool(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    output_size: Any,
) -> Subdomain | Tensor:
    """Means of adaptive windows; partial sums at the edges of parts travel."""
    sizes = output_sizes(input, AVERAGE.index(func) + 1, output_size)
    (x,) = cast_for(of_one(func, 1), input)
    return average_rows(x, sizes)


def average_rows(x: Subdomain, sizes: Sequence[int]) -> Subdomain | Tensor:
    """Average the last dims to `sizes`, one after the other."""
    given = x
    pairs = list(enumerate(sizes, x.ndim - len(sizes)))
    # torch pools volumes into results that lie row by row
    stored = format_of(x.local) if x.ndim < 5 else torch.contiguous_format
    split = set(x.layout.split_dims)
    # whole dims first: what travels along a split one is then smaller
    for dim, size in sorted(pairs, key=lambda pair: pair[0] in split):
        x = _average_dim(one_factor(x, dim), dim, size)
    x = x.like(x.local.contiguous(memory_format=stored), x.layout)
    x = in_own_memory(x, given)  # where no dim changes its extent
    return x if x.layout.split_dims else x.local


def _average_dim(x: Subdomain, dim: int, output: int) -> Subdomain:
    ((factor,), grid) = x.layout.dims[dim], x.layout.grid
    if output == factor.extent:
        return x
    if output < grid.parts(factor.axes):
        windows = (factor.extent, output, (0, output), factor.bounds(grid))
        local = sum_over(x, _averaged(x.local, dim, *windows), [dim])
        return x.like(local, x.layout.with_dims({dim: (Factor(output),)}))
    x, rows, outputs = fetched_windows(x, dim, output)
    return x.like(_averaged(x.local, dim, factor.extent, output, outputs, rows))


def _averaged(x: Tensor, dim: int, extent: int, output: int, outputs: Span, rows: Span) -> Tensor:
    """Add up what the input rows `rows` in `x` contribute to the output rows `outputs`.

    A row counts in its own windows only, also if it is NaN or infinite.
    """
    starts, sizes = _windows_within(extent, output, outputs, rows)
    kind = wide_dtype(x.dtype)
    ones = [1] * (x.ndim - dim - 1)
    with without_autocast(x):  # the types are those of its operands by now
        if _lie_beside(starts, sizes):
            rows_of_all = x.narrow(dim, starts[0], sum(sizes))
            parts = _parted(rows_of_all, dim, (len(sizes), sizes[0]))
        else:
            places, inside = _places(starts, sizes, x.device)
            parts = _parted(selected(x, dim, places.flatten()), dim, places.shape)
            parts = torch.where(inside.view(*inside.shape, *ones), parts, 0)
        sums = parts.sum(dim + 1, dtype=kind)
        counts = _counts(extent, output, outputs, kind, x.device)
        return (sums / counts.view(-1, *ones)).to(x.dtype)


def _parted(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.view([*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


@lru_cache(maxsize=1024)
def _windows_within(
    extent: int, output: int, outputs: Span, rows: Span
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Give each output row's first place in `rows`, and the count of them in its window."""
    spans = [window(o, extent, output) for o in range(*outputs)]
    cut = [(min(max(low, rows[0]), rows[1]), min(high, rows[1])) for low, high in spans]
    return tuple(a - rows[0] for a, _ in cut), tuple(max(b - a, 0) for a, b in cut)


@lru_cache(maxsize=1024)
def _lie_beside(starts: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Return True if windows of one size follow each other without a gap."""
    steps = {b - a for a, b in pairwise(starts)}
    return len({*sizes}) == 1 and sizes[0] > 0 and steps <= {sizes[0]}


@made_once
def _places(
    starts: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """(output rows, taps): the rows of each window, and which of these are in it."""
    taps = torch.arange(max(sizes, default=0), device=device)
    begin, size = (
        torch.tensor(n, dtype=torch.long, device=device)[:, None] for n in (starts, sizes)
    )
    inside = taps < size
    return torch.where(inside, begin + taps, 0), inside


@made_once
def _counts(
    extent: int, output: int, outputs: Span, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The rows of each window, on all ranks."""
    spans = [window(o, extent, output) for o in range(*outputs)]
    return torch.tensor([high - low for low, high in spans], dtype=dtype, device=device)
