"""Transposed convolutions: each rank fetches the input rows that reach its own output rows."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_shard.domain.empty_ranks import without_rows
from lightning_shard.domain.memory_format import rows_from
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.window import per_dim, spread_rows
from lightning_shard.ops.registry import implements, name_of
from lightning_shard.ops.window.conv import split_channels


@implements(
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    limits="channels and weights must be whole",
    joins=True,
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
    """Transposed convolution; input rows that reach a rank's own output rows travel."""
    x, n = input, weight.ndim - 2
    first = x.ndim - n  # the first spatial dim; 1 for an input without batch
    if x.layout.axes(first - 1):
        raise split_channels(first - 1)
    strides, dilations = per_dim(stride, n), per_dim(dilation, n)
    inner, extra = per_dim(padding, n), per_dim(output_padding, n)
    layout = x.layout.with_dim(first - 1, weight.shape[1] * groups)
    starts: dict[int, int] = {}
    for i, (k, s, p, d) in enumerate(zip(weight.shape[2:], strides, inner, dilations, strict=True)):
        dim = first + i
        output = (x.shape[dim] - 1) * s - 2 * p + d * (k - 1) + extra[i] + 1
        if extra[i] >= max(s, d) or output < 1:
            raise RuntimeError(
                f"{name_of(func)}: output padding must be smaller than stride or dilation, and the "
                f"output must have rows; got output_padding {extra[i]}, stride {s}, dilation {d} "
                f"and {output} rows in dim {dim}"
            )
        parted = x.layout.parts(dim) > 1
        if parted and (k, s, p, extra[i]) != (1, 1, 0, 0):
            x, starts[dim] = spread_rows(x, dim, output, kernel=k, stride=s, padding=p, dilation=d)
            inner[i] = extra[i] = 0
            layout = layout.with_dims({dim: x.layout.dims[dim]})
        elif not parted:
            layout = layout.with_dim(dim, output)

    def convolved(local: Tensor) -> Tensor:
        return func(local, weight, bias, strides, inner, extra, groups, dilations)

    if 0 in layout.local_shape:
        nothing = without_rows(convolved, x.local, [1] * x.ndim, layout.local_shape)
        return x.beside(weight, nothing, layout)
    local = convolved(x.local)
    return x.beside(weight, rows_from(local, starts, layout.local_shape), layout)
