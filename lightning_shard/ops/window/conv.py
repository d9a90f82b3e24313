"""Convolutions: each rank fetches the rows under its own output rows, then convolves them.

Where its part is thick enough it convolves while those rows travel (overlap.py).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.empty_ranks import without_rows
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.halo import thinness
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.local_group import after, joining
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.window import per_dim, window_rows
from lightning_shard.ops.autocast import cast_for
from lightning_shard.ops.registry import implements
from lightning_shard.ops.window.conv_together import conv_together, fits_together
from lightning_shard.ops.window.overlap import may_overlap, numbers_of, overlapped
from lightning_shard.ops.window.strips import Window, plan_of


@implements(
    F.conv1d,
    F.conv2d,
    F.conv3d,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    limits="channels and weights must be whole",
    joins=True,
)
def conv(
    func: Callable[..., Tensor],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Subdomain:
    """Convolution; rows under a rank's own output rows travel, while it computes the others."""
    n = weight.ndim - 2
    first = input.ndim - n  # the first spatial dim; 1 for an input without batch
    if input.layout.axes(first - 1):
        raise split_channels(first - 1)
    paddings = padding if isinstance(padding, str) else tuple(per_dim(padding, n))
    strides, dilations = tuple(per_dim(stride, n)), tuple(per_dim(dilation, n))
    windows = _windows(first, tuple(weight.shape[2:]), strides, paddings, dilations)
    x, weight, bias = cast_for(func, input, weight, bias)  # before rows travel
    split = _reading(x.layout, windows)
    if not split:
        return _waiting(func, x, (weight, bias), windows, groups)
    here = joining(x.domain.group(x.layout.axes(split[0].dim)))
    if here is None:
        found = _while_rows_travel(func, x, (weight, bias), windows, split, groups)
        return found or _waiting(func, x, (weight, bias), windows, groups)
    if not fits_together(x, weight, windows, split):
        return _waiting(func, x, (weight, bias), windows, groups)
    layout, parameters = _layout_of(x.layout, weight.shape[0], windows), (weight, bias)
    made = conv_together(here, func, x, parameters, windows, split[0], groups, layout)
    return after(made, lambda local: x.beside(weight, local, layout))


@lru_cache(maxsize=4096)
def _reading(layout: Layout, windows: tuple[Window, ...]) -> tuple[Window, ...]:
    """Return the windows that read rows of other ranks."""
    return tuple([w for w in windows if layout.parts(w.dim) > 1 and w.reads_others])


@lru_cache(maxsize=4096)
def _is_even(windows: tuple[Window, ...]) -> bool:
    """Return True if both sides of each dim are padded alike."""
    return all(w.before == w.after for w in windows)


def _while_rows_travel(
    func: Callable[..., Tensor],
    x: Subdomain,
    parameters: tuple[Tensor, Tensor | None],
    windows: tuple[Window, ...],
    split: tuple[Window, ...],
    groups: int,
) -> Subdomain | None:
    """Convolve this rank's own rows first; None where the rows are to come first."""
    local = x.local
    weight, bias = parameters
    if not (_is_even(windows) and may_overlap(local, weight, bias, groups)):
        return None
    plan = plan_of(x.layout, split, thinness())
    if plan is None:
        return None
    given = x.layout, x.domain, None, x.strides  # not `x`, whose rows autograd keeps

    def plain(local: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _waiting(func, Subdomain(local, *given), (weight, bias), windows, groups).local

    numbers, group = numbers_of(windows, split, groups), x.domain.group(plan.halo.axes)
    result = overlapped(plan, (local, weight, bias), numbers, plain, group)
    return x.beside(weight, result, _layout_of(x.layout, weight.shape[0], windows))


def _waiting(
    func: Callable[..., Tensor],
    x: Subdomain,
    parameters: tuple[Tensor, Tensor | None],
    windows: tuple[Window, ...],
    groups: int,
) -> Subdomain:
    """Fetch the rows, then convolve."""
    weight, bias = parameters
    reading = _reading(x.layout, windows)
    layout = _layout_of(x.layout, weight.shape[0], windows)
    for w in windows:
        if w in reading:
            x = window_rows(
                x, w.dim, layout.shape[w.dim], kernel=w.kernel, stride=w.stride, padding=w.before,
                dilation=w.dilation,
            )  # fmt: skip
        elif w.before != w.after:
            # 'same' with an even kernel: torch pads the end by one more
            x = x.like(F.pad(x.local, [0, 0] * (x.ndim - w.dim - 1) + [0, w.after - w.before]))
    strides, inner = [w.stride for w in windows], [w.before * (w not in reading) for w in windows]
    dilations = [w.dilation for w in windows]

    def convolved(local: Tensor) -> Tensor:
        return func(local, weight, bias, strides, inner, dilations, groups)

    if 0 in layout.local_shape:
        least = [1] * x.ndim
        for w in windows:
            least[w.dim] = w.dilation * (w.kernel - 1) + 1
        found = without_rows(convolved, x.local, least, layout.local_shape)
    elif x.local.numel() == 0:
        raise UnsupportedOperationError(f"a convolution of nothing to shape {layout.shape}")
    else:
        found = convolved(x.local)
    return x.beside(weight, found, layout)


@lru_cache(maxsize=4096)
def _layout_of(of_input: Layout, channels: int, windows: tuple[Window, ...]) -> Layout:
    """The layout of an output of so many channels."""
    layout = of_input.with_dim(windows[0].dim - 1, channels)
    for w in windows:
        if of_input.parts(w.dim) == 1 or w.reads_others:
            layout = layout.with_dim(w.dim, w.output(of_input.shape[w.dim]))
    return layout


def split_channels(dim: int) -> UnsupportedOperationError:
    """Make the error of a convolution whose channels are split."""
    return UnsupportedOperationError(
        f"convolution over split channels (dim {dim}), as of a field that was flattened and shaped "
        "back; keep its dims, as in an array (B, N, C, H, W) of fields instead of (B, N, C * H * W)"
    )


@lru_cache(maxsize=4096)
def _windows(
    first: int,
    kernels: tuple[int, ...],
    strides: tuple[int, ...],
    paddings: str | tuple[int, ...],
    dilations: tuple[int, ...],
) -> tuple[Window, ...]:
    """Describe the windows along each spatial dim, from `first` on."""
    least = {"stride": min(strides), "dilation": min(dilations)}
    if wrong := [f"{name} {value}" for name, value in least.items() if value < 1]:
        raise RuntimeError(f"a convolution needs numbers from 1 on; got {' and '.join(wrong)}")
    if not isinstance(paddings, str) and min(paddings) < 0:
        raise RuntimeError(f"a convolution needs a padding from 0 on; got {min(paddings)}")
    if paddings == "same":
        totals = [d * (k - 1) for k, d in zip(kernels, dilations, strict=True)]
        around = [(total // 2, total - total // 2) for total in totals]
    elif paddings == "valid":
        around = [(0, 0)] * len(kernels)
    else:
        assert not isinstance(paddings, str)
        around = [(p, p) for p in paddings]
    numbers = zip(kernels, strides, around, dilations, strict=True)
    return tuple([Window(first + i, k, s, *p, d) for i, (k, s, p, d) in enumerate(numbers)])
