"""Transposed convolutions: each rank fetches the input rows that reach its own output rows."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain import Subdomain
from lightning_shard.halo import Needs, Span, empty_attached, fetch, needs_of
from lightning_shard.ops.align import simple
from lightning_shard.ops.conv import per_dim
from lightning_shard.ops.registry import UnsupportedOperationError, implements


def spread_rows(
    x: Subdomain,
    dim: int,
    output: int,
    *,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int = 1,
    fill: float = 0.0,
) -> tuple[Subdomain, int]:
    """The rows of split `dim` whose windows reach this rank's rows of an output of `output` rows.

    Input row i spreads over output rows i * stride - padding + dilation * (0 ... kernel - 1). Rows
    beyond the edges are `fill`, so that the windows cover all of this rank's output rows.

    Returns:
        The local rows with the layout of the output in `dim`, and the place of this rank's first
        output row among all rows that they spread over. No rows where the rank has no output.
    """
    x = simple(x, dim)
    extent, grid = x.shape[dim], x.layout.grid
    layout = x.layout.with_dim(dim, output)
    (factor,) = layout.dims[dim]
    parts = grid.parts(factor.axes)
    window = (kernel, stride, padding, dilation)
    rows = fetch(x, dim, _needs(extent, parts, output, window))
    low, high = factor.bounds(grid)
    if low == high:
        return x.like(rows, layout), 0
    first, last = _reaching(low, high, *window)
    before = min(max(-first, 0), last - first)
    after = last - first - before - rows.shape[dim]
    if before or after:
        rows = F.pad(rows, [0, 0] * (x.ndim - dim - 1) + [before, after], value=fill)
    return x.like(rows, layout), low - (first * stride - padding)


def _reaching(low: int, high: int, kernel: int, stride: int, padding: int, dilation: int) -> Span:
    """Input rows whose windows cover output rows `[low, high)`; may reach beyond the edges.

    Where stride exceeds the window there are output rows that no input reaches; the span then goes
    on to the next input row, so that they lie among the rows that it spreads over.
    """
    reach = dilation * (kernel - 1)
    top, bottom = low + padding, high - 1 + padding
    first = min(-((reach - top) // stride), top // stride)
    last = max(bottom // stride, -((reach - bottom) // stride))
    return first, last + 1


@lru_cache(maxsize=4096)
def _needs(extent: int, parts: int, output: int, window: tuple[int, int, int, int]) -> Needs:
    def spans(low: int, high: int) -> list[Span]:
        first, last = _reaching(low, high, *window)
        first, last = max(first, 0), min(last, extent)
        return [(first, last)] if first < last else []

    return needs_of(output, parts, spans)


@implements(
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    limits="channels and weights must be whole",
)
def conv_transpose(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Subdomain:
    x, n = input, weight.ndim - 2
    if not isinstance(x, Subdomain) or isinstance(weight, Subdomain):
        raise UnsupportedOperationError("only the input may be split, not the weight")
    first = x.ndim - n  # the first spatial dim; 1 for an input without batch
    if x.layout.axes(first - 1):
        raise UnsupportedOperationError(f"convolution over split channels (dim {first - 1})")
    strides, dilations = per_dim(stride, n), per_dim(dilation, n)
    inner, extra = per_dim(padding, n), per_dim(output_padding, n)
    layout = x.layout.with_dim(first - 1, weight.shape[1] * groups)
    starts = {}
    for i, (k, s, p, d) in enumerate(zip(weight.shape[2:], strides, inner, dilations, strict=True)):
        dim = first + i
        output = (x.shape[dim] - 1) * s - 2 * p + d * (k - 1) + extra[i] + 1
        if extra[i] >= max(s, d) or output < 1:
            raise RuntimeError(
                f"{func.__name__}: output padding must be smaller than stride or dilation, and the "
                f"output must have rows; got output_padding {extra[i]}, stride {s}, dilation {d} "
                f"and {output} rows in dim {dim}"
            )
        if x.layout.axes(dim) and (k, s, p, extra[i]) != (1, 1, 0, 0):
            x, starts[dim] = spread_rows(x, dim, output, kernel=k, stride=s, padding=p, dilation=d)
            inner[i] = extra[i] = 0
            layout = layout.with_dims({dim: x.layout.dims[dim]})
        elif not x.layout.axes(dim):
            layout = layout.with_dim(dim, output)
    if 0 in layout.local_shape:
        return x.like(empty_attached(layout.local_shape, x.local, weight, bias), layout)
    local = func(x.local, weight, bias, strides, inner, extra, groups, dilations)
    for dim, start in starts.items():
        local = local.narrow(dim, start, layout.local_shape[dim])
    return x.like(local, layout)
