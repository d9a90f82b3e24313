"""Convolutions that compute while the rows of other ranks travel.

Of a convolution, this rank's rows alone give all its output rows as if there were zeros around
them; only the rows near the border then lack something. So the rows begin to travel, the rank
convolves its own rows, waits, and computes the few rows at the border again, with what came. In
backward what belongs to the other ranks' rows is computed first and travels back, while the
gradients of the rank's own rows and of the weight are computed.

No rank copies its rows to put others beside them. The border costs one small convolution for each
side; where parts are thin that is too much, so the sizes decide (`overlapping` in domain/halo.py).
All ranks decide alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.fetch import Span
from lightning_shard.domain.halo import (
    Box,
    Halo,
    add_framed,
    framed,
    halo_of,
    overlap_mode,
    part_of,
    places,
    return_halo,
    send_halo,
)
from lightning_shard.domain.layout import Grid, Layout
from lightning_shard.domain.tracing import is_traced
from lightning_shard.domain.window import window_needs
from lightning_shard.processes.torch_internals import in_transform

INNER = 16  # output rows for each row at the border, from which on the border is worth its price
_gradients = torch.ops.aten.convolution_backward


@dataclass(frozen=True)
class Window:
    """How a convolution reads one split dim: `before` and `after` are its padding."""

    dim: int
    kernel: int
    stride: int
    before: int
    after: int
    dilation: int

    @property
    def reads_others(self) -> bool:
        """Whether an output row reads more than the input row at its place."""
        return (self.kernel, self.stride, self.before, self.after) != (1, 1, 0, 0)

    @property
    def reach(self) -> int:
        """The rows that one output row reads, with those between."""
        return self.dilation * (self.kernel - 1) + 1

    def output(self, extent: int) -> int:
        return (extent + self.before + self.after - self.reach) // self.stride + 1

    def under(self, rows: Span, padding: int) -> Span:
        """The input rows under output rows, whose windows begin at `-padding`."""
        low, high = rows
        return low * self.stride - padding, (high - 1) * self.stride - padding + self.reach


@dataclass(frozen=True)
class Side:
    """Of one rank and one split dim: rows in and out, and at which of them others are needed.

    Attributes:
        rows: Input rows.
        output: Output rows.
        padding: Where the first window begins before the first row.
        first: Output rows at the beginning that need other ranks' rows.
        last: Those at the end.
    """

    rows: int
    output: int
    padding: int
    first: int
    last: int


@dataclass(frozen=True)
class Plan:
    """What travels, and what this rank computes.

    Attributes:
        halo: The rows that travel.
        own: The box of this rank's rows.
        paddings: For each split dim the zeros around this rank's rows.
        border: Output boxes that other ranks' rows belong to, each with the input rows under it.
    """

    halo: Halo
    own: Box
    paddings: dict[int, int]
    border: tuple[tuple[Box, Box], ...]


@lru_cache(maxsize=4096)
def plan_of(layout: Layout, windows: tuple[Window, ...], always: bool) -> Plan | None:
    """The plan for a convolution of a tensor of this layout; None where it is to wait instead.

    Args:
        layout: Of the input.
        windows: Of the split dims.
        always: Whether thin parts compute while rows travel, too.
    """
    axes = layout.axes(*(w.dim for w in windows))
    if not windows or any(len(layout.dims[w.dim]) > 1 for w in windows):
        return None
    if len(windows) > 1 and len(axes) < len(layout.grid.sizes):
        return None  # ranks along some axes of several have no group
    for place in places(layout.grid, axes):
        if not all(_is_possible(_side(layout, w, place), w, always) for w in windows):
            return None
    needs = tuple(
        (w.dim, window_needs(layout.shape[w.dim], layout.grid.parts(layout.axes(w.dim)),
                             w.output(layout.shape[w.dim]), w.kernel, w.stride, w.before,
                             w.dilation))
        for w in windows
    )  # fmt: skip
    sides = [_side(layout, w, layout.grid) for w in windows]
    return Plan(
        halo_of(layout, needs),
        tuple((0, side.rows) for side in sides),
        {w.dim: side.padding for w, side in zip(windows, sides, strict=True)},
        tuple(_border(windows, sides)),
    )


def _side(layout: Layout, window: Window, place: Grid) -> Side:
    (factor,) = layout.dims[window.dim]
    low, high = factor.bounds(place)
    output = factor._replace(extent=max(window.output(factor.extent), 0))
    start, end = output.bounds(place)
    padding = window.before + low - start * window.stride
    _, last = window.under((start, end), window.before)
    rows = end - start
    at_first = -(-padding // window.stride) if low > 0 else 0
    inner = (high - low + padding - window.reach) // window.stride + 1  # rows that end within
    at_last = rows - inner if last > high and high < factor.extent else 0
    at_first = min(max(at_first, 0), rows)
    return Side(high - low, rows, padding, at_first, min(max(at_last, 0), rows - at_first))


def _is_possible(side: Side, window: Window, always: bool) -> bool:
    """Whether the rank's rows with zeros around them give as many rows as its part of the output.

    And whether it has enough rows for that to be worth its price.
    """
    reach = side.rows + 2 * side.padding - window.reach
    if side.padding < 0 or reach < 0 or not side.rows or not side.output:
        return False
    enough = side.output >= INNER * (side.first + side.last)
    return reach // window.stride + 1 == side.output and (always or enough)


def _border(windows: Sequence[Window], sides: Sequence[Side]) -> list[tuple[Box, Box]]:
    found: list[tuple[Box, Box]] = []
    rows = [(0, side.output) for side in sides]
    for i, side in enumerate(sides):
        for part in ((0, side.first), (side.output - side.last, side.output)):
            if part[0] < part[1]:
                box = (*rows[:i], part, *rows[i + 1 :])
                under = [w.under(r, s.padding) for w, r, s in zip(windows, box, sides, strict=True)]
                found.append((box, tuple(under)))
        rows[i] = (side.first, side.output - side.last)
    return [(box, under) for box, under in found if all(low < high for low, high in box)]


@dataclass(frozen=True)
class Numbers:
    """The numbers of a convolution, for each spatial dim; padding is that of whole dims."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @staticmethod
    def of(windows: Sequence[Window], groups: int) -> "Numbers":
        """Those of a convolution that reads its spatial dims through these windows."""
        return Numbers(
            [w.stride for w in windows],
            [w.before for w in windows],
            [w.dilation for w in windows],
            groups,
        )

    def around(self, paddings: dict[int, int]) -> list[int]:
        """The padding, with that of split dims."""
        first = 2  # the first spatial dim
        return [paddings.get(first + i, p) for i, p in enumerate(self.padding)]


def overlapped(
    plan: Plan,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    numbers: Numbers,
    plain: Callable[..., Tensor],
    group: dist.ProcessGroup,
) -> Tensor:
    """This rank's rows of a convolution.

    Args:
        plan: What travels.
        tensors: This rank's rows, the weight and the bias.
        numbers: Those of the convolution.
        plain: The same function of the tensors, differentiable twice; it waits for the rows.
        group: The ranks.
    """
    return _Overlapped.apply(*tensors, plan, numbers, plain, group)


def may_overlap(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> bool:
    """Whether these are tensors of a convolution that torch takes as they are."""
    given = [t for t in (x, weight, bias) if t is not None]
    return (
        overlap_mode() != "never"
        and x.ndim == weight.ndim
        and x.numel() > 0
        and weight.numel() > 0
        and groups > 0
        and x.shape[1] == weight.shape[1] * groups
        and weight.shape[0] % groups == 0
        and (bias is None or bias.shape == weight.shape[:1])
        and all(t.dtype == x.dtype and t.device == x.device for t in given)
        and x.dtype.is_floating_point
        and not is_traced()
        and not in_transform()
    )


class _Overlapped(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        numbers: Numbers,
        plain: Callable[..., Tensor],
        group: dist.ProcessGroup,
    ) -> Tensor:
        wait = send_halo(x, plan.halo, group)
        result = _convolved(x, weight, bias, numbers, numbers.around(plan.paddings))
        others = wait()
        dims, inner = plan.halo.dims, numbers.around(dict.fromkeys(plan.halo.dims, 0))
        around = {plan.own: x, **_boxes(plan.halo, others)}
        for box, under in plan.border:
            rows = framed(x, dims, under, around)
            part_of(result, dims, box).copy_(_convolved(rows, weight, bias, numbers, inner))
        ctx.save_for_backward(x, weight, bias, *others)
        ctx.plan = plan, numbers, plain, group
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight, bias, *others) = grads, ctx.saved_tensors
        plan, numbers, plain, group = ctx.plan
        wanted = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # they are to be differentiated again
            given = [t for t, wants in zip((x, weight, bias), wanted, strict=True) if wants]
            again = torch.autograd.grad(plain(x, weight, bias), given, grad, create_graph=True)
            found = iter(again)
            return *(next(found) if wants else None for wants in wanted), None, None, None, None
        dims, inner = plan.halo.dims, numbers.around(dict.fromkeys(plan.halo.dims, 0))
        theirs = _boxes(plan.halo, others)
        returned = {box: torch.zeros_like(part) for box, part in theirs.items()}
        extra: list[Tensor] = []
        for box, under in plan.border:
            rows = framed(x, dims, under, theirs)
            mask = [wanted[0], wanted[1], False]
            of_rows, of_weight, _ = _gradients_of(
                part_of(grad, dims, box), rows, weight, numbers, inner, mask
            )
            if wanted[0]:
                add_framed(of_rows, dims, under, returned)
            if wanted[1]:
                extra.append(of_weight)
        add_to = return_halo([*returned.values()], plan.halo, x, group) if wanted[0] else None
        own = numbers.around(plan.paddings)
        of_x, of_weight, of_bias = _gradients_of(grad, x, weight, numbers, own, wanted)
        for part in extra:
            of_weight += part
        if add_to is not None:
            add_to(of_x)
        return of_x, of_weight, of_bias, None, None, None, None


def _boxes(halo: Halo, parts: Sequence[Tensor]) -> dict[Box, Tensor]:
    return dict(zip([box for box in halo.receives if box is not None], parts, strict=True))


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Numbers, padding: list[int]
) -> Tensor:
    none = [0] * len(padding)
    dilation, groups = numbers.dilation, numbers.groups
    return torch.convolution(
        x, weight, bias, numbers.stride, padding, dilation, False, none, groups
    )


def _gradients_of(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    numbers: Numbers,
    padding: list[int],
    wanted: list[bool],
) -> tuple[Any, Any, Any]:
    own = (numbers.stride, padding, numbers.dilation, False, [0] * len(padding), numbers.groups)
    return _gradients(grad, x, weight, [weight.shape[0]], *own, wanted)
