"""Interpolation: each dim is a product with a narrow band of weights, which torch's kernel tells.

Every mode works dim by dim. For a split dim the kernel itself is run once on combs of zeros and
ones: its answers are the weights with which it reads the rows, rounded as it rounds them. Combs of
NaN tell which rows it reads, also with a weight of 0, since NaN in such a row counts. A rank then
fetches the rows under its output rows. Dims that are whole go through torch's function.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import in_own_memory, one_factor
from lightning_shard.domain.cache import made_once
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import Needs, Span, fetch_to_read, needs_of
from lightning_shard.domain.half import wide_dtype
from lightning_shard.domain.memory_format import format_of, selected
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import cast_for, of_one
from lightning_shard.ops.registry import implements
from lightning_shard.ops.window.adaptive_pool import average_rows
from lightning_shard.processes.torch_private.internals import without_modes
from lightning_shard.processes.torch_private.typed import integers

HALF_WIDTH = {"nearest": 0.5, "nearest-exact": 0.5, "linear": 1, "bilinear": 1, "trilinear": 1,
              "bicubic": 2}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """The mode of interpolation along one dim, in torch's words."""

    mode: str
    align_corners: bool | None
    antialias: bool

    def __call__(self, x: Tensor, output: int, scale: float | None) -> Tensor:
        """Interpolate the last dim: (1, C, 1, N) -> (1, C, 1, output)."""
        mode = "bilinear" if self.mode in ("linear", "trilinear") else self.mode
        size: dict[str, Any] = (
            {"size": (1, output)} if scale is None else {"scale_factor": (1.0, scale)}
        )
        return F.interpolate(
            x, **size, mode=mode, align_corners=self.align_corners, antialias=self.antialias
        )


@dataclass(frozen=True)
class Band:
    """Output row o is the sum over t of `weights[o, t]` times input row `starts[o] + t`.

    Rows from `stops[o]` on are not read for it: row `starts[o]`, which is read again in the place
    of each, has its weight in equal shares. A share of 0 would make NaN of an infinity.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    weights: Tensor  # (output rows, taps)


@dataclass(frozen=True)
class Resize:
    """The numbers on which the weights of one interpolated dim depend."""

    extent: int
    output: int
    scale: float | None
    kernel: Kernel
    dtype: torch.dtype
    device: torch.device


@made_once
def band(resize: Resize) -> Band:
    """Ask the kernel for its weights.

    It interpolates a ramp, which tells where an output row lies, and combs with one row in `period`
    set, which tell the weights of all rows near there, and which are read.
    """
    extent, output, scale, kernel = resize.extent, resize.output, resize.scale, resize.kernel
    dtype, device = resize.dtype, resize.device
    ratio = max(extent / output, 1 / scale if scale else 0, 1) if kernel.antialias else 1
    period = min(4 * math.ceil(HALF_WIDTH[kernel.mode] * ratio) + 6, extent)
    # fake tensors have no numbers, and the rows that are read are kept (`_needs`)
    with without_modes(), torch.autocast(device.type, enabled=False):
        rows = torch.arange(extent, device=device)
        center = kernel(rows.to(dtype).view(1, 1, 1, -1), output, scale).view(-1)
        base = (center.floor().long() - period // 2).clamp(0, extent - period)
        combs = (rows % period == torch.arange(period, device=device)[:, None]).to(dtype)
        holes = torch.zeros_like(combs).masked_fill(combs == 1, math.nan)
        answers, read = (kernel(c[None, :, None], output, scale)[0, :, 0] for c in (combs, holes))
        near = (base[:, None] + torch.arange(period, device=device)) % period
        weights, used = answers.t().gather(1, near), read.isnan().int().t().gather(1, near)
        first, last = used.argmax(1), period - 1 - used.flip(1).argmax(1)
        taps = first[:, None] + torch.arange(int((last - first).max()) + 1, device=device)
        is_read = taps <= last[:, None]
        shares = weights.gather(1, first[:, None]) / (1 + (~is_read).sum(1, keepdim=True))
        weights = weights.gather(1, taps.clamp(max=period - 1)).where(is_read, shares)
        weights[:, :1] = shares
    return Band(tuple(integers(base + first)), tuple(integers(base + last + 1)), weights)


@lru_cache(maxsize=1024)
def _needs(resize: Resize, parts: int) -> Needs:
    of = band(resize)

    def spans(low: int, high: int) -> list[Span]:
        return [(min(of.starts[low:high]), max(of.stops[low:high]))]

    return needs_of(len(of.starts), parts, spans)


@made_once
def _local_rows(resize: Resize, span: Span, low: int, high: int) -> Tensor:
    """(output rows, taps): the places among fetched rows `span` of the rows to be weighted."""
    of = band(resize)
    ends = (of.starts[low:high], of.stops[low:high])
    starts, stops = torch.tensor(ends, device=resize.device)[..., None] - span[0]
    places = starts + torch.arange(of.weights.shape[1], device=resize.device)
    return torch.where(places < stops, places, starts)


def _interpolate_dim(
    x: Subdomain, dim: int, output: int, scale: float | None, kernel: Kernel
) -> Subdomain:
    x = one_factor(x, dim)
    grid, layout = x.layout.grid, x.layout.with_dim(dim, output)
    (factor,) = layout.dims[dim]
    kind = wide_dtype(x.dtype) if x.dtype.is_floating_point else torch.float32
    resize = Resize(x.shape[dim], output, scale, kernel, kind, x.local.device)
    needs = _needs(resize, grid.parts(factor.axes))
    rows = fetch_to_read(x, dim, needs) if factor.axes else x.local
    low, high = factor.bounds(grid)
    if low == high:
        return x.like(rows, layout)
    span = needs[grid.index(factor.axes)][0] if factor.axes else (0, x.shape[dim])
    places = _local_rows(resize, span, low, high)
    if kernel.mode.startswith("nearest"):
        return x.like(selected(rows, dim, places[:, 0]), layout)
    weights = band(resize).weights[low:high].view(high - low, -1, *[1] * (x.ndim - dim - 1))
    local = selected(rows, dim, places[:, 0]) * weights[:, 0]
    for t in range(1, places.shape[1]):
        local = torch.addcmul(local, selected(rows, dim, places[:, t]), weights[:, t])
    return x.like(local.to(x.dtype), layout)


@implements(F.interpolate, joins=True)
def interpolate(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Subdomain | Tensor:
    """Interpolate split dims by their bands, then whole and repeated dims by torch's function."""
    x, n = input, input.ndim - 2
    size = size if size is None or isinstance(size, int) else tuple(map(int, size))
    factors = None if scale_factor is None else tuple(_per_dim(scale_factor, n))
    kernel = Kernel(mode, align_corners, antialias)
    shape = _output_shape(x.shape, size, factors, bool(recompute_scale_factor))
    if mode not in (*HALF_WIDTH, "area"):
        raise UnsupportedOperationError(f"interpolation with mode {mode!r}")
    if not (x.dtype.is_floating_point or mode.startswith("nearest")):
        raise UnsupportedOperationError(f"interpolation of {x.dtype} with mode {mode!r}")
    (x,) = cast_for(of_one(F.interpolate, (1,) * n, None, mode), x)
    if mode == "area":
        return average_rows(x, shape[2:])
    scales: list[float | None] = [None] * n
    if factors and not recompute_scale_factor:
        scales = list(factors)
    at_once: list[int] = []  # the dims that torch's function interpolates
    # torch 2.15's antialiased kernel is wrong on the CPU for outputs of width 1, and its bicubic
    # one reads rows of the other dim with weights of 0
    never = antialias or (mode == "bicubic" and (x.layout.axes(2) or x.layout.axes(3)))
    for dim in range(2, x.ndim):
        scale = scales[dim - 2]
        repeats = mode == "nearest" and _repeats_own_rows(x, dim, shape[dim], scale)
        if never or (x.layout.axes(dim) and not repeats):
            x = _interpolate_dim(x, dim, shape[dim], scale, kernel)
        else:
            at_once.append(dim)
    return in_own_memory(_by_torch(x, at_once, shape, scales, kernel), input)


def _repeats_own_rows(x: Subdomain, dim: int, output: int, scale: float | None) -> bool:
    """Return True if each rank's output rows repeat its own input rows 2^k times.

    Then torch's function of this rank's rows finds the same rows as that of all rows: products with
    a power of two are exact.
    """
    factors, extent = x.layout.dims[dim], x.shape[dim]
    times = output // max(extent, 1)
    return (
        len(factors) == 1
        and times * extent == output
        and scale in (None, times)
        and times.bit_count() == 1
        and extent % x.layout.grid.parts(factors[0].axes) == 0
    )


def _by_torch(
    x: Subdomain,
    dims: Sequence[int],
    shape: Sequence[int],
    scales: Sequence[float | None],
    kernel: Kernel,
) -> Subdomain:
    """Interpolate `dims` of this rank's part."""
    is_same = all(shape[d] == x.shape[d] and scales[d - 2] in (None, 1) for d in dims)
    if is_same and (kernel.mode != "bicubic" or not dims):  # bicubic reads rows beside each, too
        return x
    layout = x.layout
    for dim in dims:
        layout = layout.with_dim(dim, shape[dim])
    if 0 in layout.local_shape:
        return x.like(empty_attached(layout.local_shape, x.local), layout)
    others = split = [d for d in range(2, x.ndim) if d not in dims]
    if kernel.mode.startswith("nearest"):
        dims, others = range(2, x.ndim), []
    given: dict[str, Any] = {"size": [layout.local_shape[d] for d in dims]}
    if None not in scales:
        given = {"scale_factor": [1.0 if d in split else scales[d - 2] for d in dims]}
    if not others:
        local = F.interpolate(
            x.local, **given, mode=kernel.mode, align_corners=kernel.align_corners
        )
        return x.like(local, layout)
    # the kernel would read each row of other dims twice, once with a weight of 0
    order = [0, 1, *others, *dims]
    rows = x.local.permute(order)
    mode = ("linear", "bilinear")[len(dims) - 1]
    flat = rows.flatten(1, len(others) + 1)
    made = F.interpolate(flat, **given, mode=mode, align_corners=kernel.align_corners)
    local = made.view(*rows.shape[: -len(dims)], *made.shape[2:])
    local = local.permute([order.index(d) for d in range(x.ndim)])
    return x.like(local.contiguous(memory_format=format_of(x.local)), layout)


@lru_cache(maxsize=1024)
def _output_shape(
    shape: tuple[int, ...],
    size: int | tuple[int, ...] | None,
    factors: tuple[float, ...] | None,
    recompute: bool,
) -> tuple[int, ...]:
    """Compute the output shape as torch does; it is the same in every mode."""
    meta = torch.empty((1, 1, *shape[2:]), device="meta")  # torch 2.15 fails for no samples on it
    found = F.interpolate(meta, size, factors, "nearest", recompute_scale_factor=recompute or None)
    return (*shape[:2], *found.shape[2:])


def _per_dim(value: float | Sequence[float], count: int) -> list[float]:
    return [value] * count if isinstance(value, int | float) else list(value)
