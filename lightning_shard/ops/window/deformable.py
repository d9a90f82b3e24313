"""Deformable convolution of torchvision: each rank fetches the rows that the offsets may reach.

How far they reach is known only when they are: the ranks agree on the farthest of each dim, and
fetch so many rows more. The offsets that the operator gets are counted from the first row fetched.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import (
    all_gather_small,
    local_part,
    one_factor,
    subdomains,
    take_local,
    whole,
)
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import Span, fetch, needs_of
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements_operator
from lightning_shard.ops.view.aligned import Operand, as_split, refuse_other_domains


@dataclass(frozen=True)
class _Reach:
    """The window along one spatial dim: a convolution's, and offsets from `low` to `high`."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    low: int
    high: int

    def span(self, first: int, end: int, extent: int) -> Span:
        """The input rows that output rows `[first, end)` read; one at least."""
        begin = first * self.stride - self.padding + self.low
        last = (end - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1)
        begin = min(max(begin, 0), extent - 1)
        return begin, max(min(last + self.high + 2, extent), begin + 1)

    def reads(self, rows: int) -> int:
        """Count the input rows that a kernel without padding reads for so many output rows."""
        return (rows - 1) * self.stride + self.dilation * (self.kernel - 1) + 1

    def writes(self, rows: int) -> int:
        """Count the output rows that so many input rows give."""
        return (rows - self.reads(1)) // self.stride + 1


@implements_operator("torchvision.deform_conv2d", limits="channels and weights must be whole")
def deform_conv2d(
    func: Callable[..., Tensor],
    x: Operand,
    weight: Tensor,
    offset: Operand,
    mask: Operand,
    bias: Tensor,
    *numbers: int,
) -> Subdomain:
    """Convolve (B, C, H, W) at places that offsets (B, 2 * groups * kernel, H', W') move.

    The numbers are strides, paddings and dilations (two of each), groups of weights and of offsets,
    and whether there is a mask.

    Raises:
        UnsupportedOperationError: Channels are split.
    """
    refuse_other_domains(x, offset, mask)
    split = subdomains([offset, x, mask])
    if any(o.layout.axes(1) for o in split):
        raise UnsupportedOperationError("a deformable convolution of split channels")
    layout = _layout_of(x, weight, offset, split)
    batch, _, *places = layout.dims

    def part(o: Operand) -> Tensor:
        return local_part(o, Layout((batch, (Factor(o.shape[1]),), *places), layout.grid))

    moved, masks = part(offset), part(mask) if numbers[8] else None
    rows = _moved_as(as_split(x, split[0]), layout)
    local, paddings = rows.local, list(numbers[2:4])
    for i, (kernel, d) in enumerate(zip(weight.shape[2:], (2, 3), strict=True)):
        if not layout.axes(d):
            continue
        ends = _ends(split[0], moved, i)
        reach = _Reach(kernel, numbers[i], paddings[i], numbers[4 + i], *ends)
        local, begin = _fetched(rows.like(local), d, reach, layout)
        low, high = layout.dims[d][0].bounds(layout.grid)
        moved = _from_row(moved, i, low * reach.stride - reach.padding - begin)
        paddings[i] = 0
        if high > low:
            missing = max(reach.reads(high - low) - local.shape[d], 0)
            local = _longer(local, d, missing)
            added = reach.writes(local.shape[d]) - (high - low)
            moved = _longer(moved, d, added, -local.shape[d])
            masks = None if masks is None else _longer(masks, d, added)
    if layout.axes(0) and not rows.layout.axes(0):
        local = take_local(local, 0, batch, layout.grid)
    if 0 in layout.local_shape:
        kept = empty_attached(layout.local_shape, local, moved, masks, weight, bias)
        return rows.like(kept, layout)
    masks = local.new_zeros(len(local), 1) if masks is None else masks
    found = func(local, weight, moved, masks, bias, *numbers[:2], *paddings, *numbers[4:])
    height, width = layout.local_shape[2:]
    return rows.like(found[:, :, :height, :width].contiguous(), layout)


def _layout_of(x: Operand, weight: Tensor, offset: Operand, split: list[Subdomain]) -> Layout:
    """The layout of the result: split as the offsets, else as the images."""
    shape = (x.shape[0], weight.shape[0], *offset.shape[2:])
    layout = Layout.of(shape, {}, split[0].layout.grid)
    for o in split:
        for d in (0, 2, 3):
            if not set(o.layout.axes(d)) & set(layout.axes()) and not layout.axes(d):
                layout = layout.with_dim(d, shape[d], o.layout.axes(d))
    return layout


def _moved_as(x: Subdomain, layout: Layout) -> Subdomain:
    """The images, with no dim split but over the ranks that split it in the result."""
    for d in x.layout.split_dims:
        x = whole(x, d) if x.layout.axes(d) != layout.axes(d) else one_factor(x, d)
    return x


def _ends(owner: Subdomain, moved: Tensor, i: int) -> tuple[int, int]:
    """The least and the largest offset of one dim on any rank, rounded away from each other."""
    own = torch.unflatten(moved.detach(), 1, (-1, 2))[:, :, i].double().nan_to_num()
    ends = torch.zeros(2, dtype=torch.float64, device=moved.device)
    if own.numel():
        ends = torch.stack([own.amin().floor(), own.amax().ceil()])
    everywhere = all_gather_small(owner, tuple(range(len(owner.layout.grid.sizes))), ends)
    return int(everywhere[:, 0].min()), int(everywhere[:, 1].max())


def _fetched(x: Subdomain, d: int, reach: _Reach, layout: Layout) -> tuple[Tensor, int]:
    """The rows that this rank's part of the result reads, and the number of the first."""
    extent, (factor,) = x.shape[d], layout.dims[d]
    needs = needs_of(
        factor.extent,
        layout.grid.parts(factor.axes),
        lambda low, high: [reach.span(low, high, extent)],
    )
    own = needs[layout.grid.index(factor.axes)]
    begin, end = own[0] if own else (0, 0)
    if x.layout.axes(d):
        return fetch(x, d, needs), begin
    return x.local.narrow(d, begin, end - begin), begin


def _from_row(moved: Tensor, i: int, step: int) -> Tensor:
    """Offsets of one dim, counted from another row."""
    steps = moved.new_zeros(2, 1, 1)
    steps[i] = step
    return (torch.unflatten(moved, 1, (-1, 2)) + steps).flatten(1, 2)


def _longer(x: Tensor, d: int, rows: int, value: float = 0.0) -> Tensor:
    """Rows of `value` at the end: places outside of the image, or results that nobody reads.

    Such results are read outside of the image, too: 0 times NaN would be a gradient of the weights.
    """
    return F.pad(x, [0, 0] * (x.ndim - 1 - d) + [0, rows], value=value) if rows else x
