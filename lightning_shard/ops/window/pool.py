"""Pooling: each rank fetches the rows under its own windows, then torch's function pools them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.window import per_dim, window_rows
from lightning_shard.ops.autocast import cast_for, of_one
from lightning_shard.ops.registry import implements

MAX: tuple[Callable[..., Any], ...] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
MAX_WITH_INDICES: tuple[Callable[..., Any], ...] = (
    F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices,
)  # fmt: skip
AVERAGE: tuple[Callable[..., Any], ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
SPATIAL_DIMS: dict[Callable[..., Any], int] = {
    torch.max_pool1d: 1, torch.max_pool2d: 2, torch.max_pool3d: 3, torch.max_pool1d_with_indices: 1,
    **{f: n for n, f in enumerate(MAX, 1)}, **{f: n for n, f in enumerate(MAX_WITH_INDICES, 1)},
    **{f: n for n, f in enumerate(AVERAGE, 1)},
    F.lp_pool1d: 1, F.lp_pool2d: 2, F.lp_pool3d: 3,
}  # fmt: skip


def pooled_extent(
    extent: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Output rows of a pooling; with `ceil_mode` the last window may hang over the edge."""
    if padding > (dilation * (kernel - 1) + 1) // 2:
        raise RuntimeError(
            "pad should be at most half of effective kernel size, but got "
            f"pad={padding}, kernel_size={kernel} and dilation={dilation}"
        )
    reach = extent + 2 * padding - dilation * (kernel - 1) - 1
    output = (-(-reach // stride) if ceil_mode else reach // stride) + 1
    if ceil_mode and (output - 1) * stride >= extent + padding:
        output -= 1
    if output < 1:
        raise RuntimeError(f"pooling of {extent} rows with kernel_size={kernel} leaves no rows")
    return output


def _pooled(
    func: Callable[..., Any],
    x: Subdomain,
    n: int,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
) -> tuple[Subdomain, Layout, tuple[list[int], ...]]:
    """Rows to pool, also beyond the edges of split dims; the output's layout; the windows."""
    (x,) = cast_for(of_one(func, 1), x)
    kernels, dilations = per_dim(kernel_size, n), per_dim(dilation, n)
    strides, inner = per_dim(stride or kernels, n), per_dim(padding, n)
    fill = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    layout = x.layout
    for i, (k, s, p, d) in enumerate(zip(kernels, strides, inner, dilations, strict=True)):
        dim = x.ndim - n + i
        output = pooled_extent(x.shape[dim], k, s, p, d, ceil_mode)
        if x.layout.parts(dim) > 1:
            x = window_rows(
                x, dim, output, kernel=k, stride=s, padding=p, dilation=d, fill=fill, repeats=True
            )
            inner[i] = 0
            layout = layout.with_dims({dim: x.layout.dims[dim]})
        else:
            layout = layout.with_dim(dim, output)
    return x, layout, (kernels, strides, inner, dilations)


@implements(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d, *MAX, joins=True)
def max_pool(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Subdomain:
    """Maxima of windows; rows under a rank's own windows travel."""
    n = SPATIAL_DIMS[func]
    x, layout, windows = _pooled(func, input, n, kernel_size, stride, padding, dilation, ceil_mode)
    if 0 in layout.local_shape:
        return x.like(empty_attached(layout.local_shape, x.local, is_curved=True), layout)
    return x.like(MAX[n - 1](x.local, *windows, ceil_mode), layout)


@implements(torch.max_pool1d_with_indices, *MAX_WITH_INDICES)
def max_pool_with_indices(
    func: Callable[..., Any],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = True,
) -> tuple[Subdomain, Subdomain]:
    """Indices are those of the flattened global image, as torch gives them."""
    n = SPATIAL_DIMS[func]
    x, layout, windows = _pooled(func, input, n, kernel_size, stride, padding, dilation, ceil_mode)
    if 0 in layout.local_shape:
        values = empty_attached(layout.local_shape, x.local, is_curved=True)
        return x.like(values, layout), x.like(values.detach().long(), layout)
    values, places = MAX_WITH_INDICES[n - 1](x.local, *windows, ceil_mode)
    firsts: list[int] = []
    paddings = per_dim(padding, n)
    for i in range(n):
        dim = input.ndim - n + i
        low, _ = layout.dims[dim][0].bounds(layout.grid)
        firsts.append(low * windows[1][i] - paddings[i] if layout.parts(dim) > 1 else 0)
    indices = _global_indices(places, x.local.shape[-n:], firsts, input.shape[-n:], windows[3])
    return x.like(values, layout), x.like(indices, layout)


def _global_indices(
    places: Tensor,
    local: Sequence[int],
    firsts: Sequence[int],
    extents: Sequence[int],
    dilations: Sequence[int],
) -> Tensor:
    """Flat places in `local` rows, which begin at global rows `firsts`, as places in `extents`.

    Those beyond the first edge are copies of the first rows of their windows.
    """
    indices = torch.zeros_like(places)
    for coordinate, first, extent, dilation in zip(
        unflat(places, local), firsts, extents, dilations, strict=True
    ):
        row = coordinate + first
        row = torch.where(row < 0, row % dilation, row).clamp(max=extent - 1)
        indices = indices * extent + row
    return indices


def unflat(places: Tensor, extents: Sequence[int]) -> list[Tensor]:
    """Return the coordinates of flat places in an array of `extents`."""
    coordinates: list[Tensor] = []
    for extent in reversed(extents):
        coordinates.append(places % extent)
        places = places.div(extent, rounding_mode="floor")
    return coordinates[::-1]


@implements(*AVERAGE, limits="no integers", joins=True)
def avg_pool(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Subdomain:
    """Averages over full windows of zero-padded rows, corrected by what each one counts."""
    n = SPATIAL_DIMS[func]
    (x,) = cast_for(of_one(func, 1), input)
    if not x.dtype.is_floating_point:
        raise UnsupportedOperationError(f"an average of {x.dtype}, which torch rounds; pool floats")
    kernels = per_dim(kernel_size, n)
    strides, paddings = per_dim(stride or kernels, n), per_dim(padding, n)
    corrections: list[list[float]] = []
    for i, (k, s, p) in enumerate(zip(kernels, strides, paddings, strict=True)):
        dim = x.ndim - n + i
        extent = x.shape[dim]
        output = pooled_extent(extent, k, s, p, 1, ceil_mode)
        if x.layout.axes(dim):
            x = window_rows(x, dim, output, kernel=k, stride=s, padding=p)
        else:
            after = (output - 1) * s + k - p - extent
            padded = F.pad(x.local, [0, 0] * (x.ndim - dim - 1) + [p, max(after, 0)])
            x = x.like(padded, x.layout.with_dim(dim, output))
        low, high = x.layout.dims[dim][0].bounds(x.layout.grid)
        edges = (-p, extent + p) if count_include_pad else (0, extent)
        corrections.append(_corrections(range(low, high), k, s, p, edges))
    if 0 in x.layout.local_shape:
        return x.like(empty_attached(x.layout.local_shape, x.local, is_curved=True))
    averages = AVERAGE[n - 1](x.local, kernels, strides)
    if divisor_override is not None:
        return x.like(averages * (math.prod(kernels) / divisor_override))
    for i, correction in enumerate(corrections):
        if any(c != 1 for c in correction):
            factor = torch.tensor(correction, dtype=averages.dtype, device=averages.device)
            averages = averages * factor.view(-1, *[1] * (n - 1 - i))
    return x.like(averages)


def _corrections(
    rows: range, kernel: int, stride: int, padding: int, edges: tuple[int, int]
) -> list[float]:
    """Give each output row the factor from the window's size to the rows that count."""
    starts = [row * stride - padding for row in rows]
    return [kernel / (min(start + kernel, edges[1]) - max(start, edges[0])) for start in starts]


@implements(F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)
def lp_pool(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    norm_type: float,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    ceil_mode: bool = False,
) -> Subdomain:
    """Compose it of other poolings, as torch does."""
    x, n = input, SPATIAL_DIMS[func]
    if norm_type == 0:
        raise ValueError(f"norm_type must be a non-zero value, but got {norm_type}")
    if math.isinf(norm_type):
        sign = 1 if norm_type > 0 else -1
        extreme = max_pool(
            MAX[n - 1], x.like(sign * x.local.abs()), kernel_size, stride, ceil_mode=ceil_mode
        )
        return x.like(sign * extreme.local, extreme.layout)
    powers = x.like(x.local.pow(norm_type))
    mean = avg_pool(AVERAGE[n - 1], powers, kernel_size, stride, ceil_mode=ceil_mode)
    total = torch.sign(mean.local) * F.relu(mean.local.abs())
    size = math.prod(per_dim(kernel_size, n))
    return mean.like(total.mul(size).pow(1.0 / norm_type))
