"""Convolutions of all tiles of a process at once: each reads the rows of its neighbours in place.

A tile's rows and those around them are put together for one convolution, and once more for its
gradients. Nobody keeps them in between. So a tile costs one copy more than a plain convolution.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.fetch import route_of
from lightning_shard.domain.half import wide
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.local_group import Later, LocalGroup
from lightning_shard.domain.memory_format import format_of, joined
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.together import Read, Route, Sources, reads_of
from lightning_shard.domain.window import window_plan
from lightning_shard.ops.window.strips import Window
from lightning_shard.processes.torch_private.internals import in_memory

_gradients = torch.ops.aten.convolution_backward


class Numbers(NamedTuple):
    """Holds the numbers that torch asks a convolution for.

    Attributes:
        dim: The split dim.
        stride: The stride along each spatial dim.
        padding: The padding of each; 0 of the split one, whose rows beyond the edges are zeros.
        dilation: The dilation along each spatial dim.
        groups: The number of groups of channels.
        moves: True while tiles may leave memory, so that each is best read alone.
    """

    dim: int
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    moves: bool


class _Plan(NamedTuple):
    """Describes the rows that one tile reads and makes.

    Attributes:
        reads: The rows that it reads, of all tiles.
        before: The number of rows of zeros before them.
        after: The number of rows of zeros after them.
        shape: The shape of its result.
    """

    reads: list[Read]
    before: int
    after: int
    shape: tuple[int, ...]


class _Member(NamedTuple):
    """Holds the rows that one tile brings, and how it reads those of others."""

    local: Tensor
    route: Route
    before: int
    after: int
    shape: tuple[int, ...]


def fits_together(
    x: Subdomain, weight: Tensor, windows: Sequence[Window], split: Sequence[Window]
) -> bool:
    """Return whether tiles convolve at once; else each waits for its rows.

    Args:
        x: The tile.
        weight: The weight of the convolution.
        windows: The windows along all spatial dims.
        split: The windows among them that read rows of other tiles.
    """
    alike = all(w.before == w.after or w in split for w in windows)
    plain = x.ndim == weight.ndim and x.dtype.is_floating_point and weight.dtype == x.dtype
    return len(split) == 1 and alike and plain and len(x.layout.dims[split[0].dim]) == 1


def conv_together(
    here: LocalGroup,
    func: Callable[..., Tensor],
    x: Subdomain,
    parameters: tuple[Tensor, Tensor | None],
    windows: Sequence[Window],
    w: Window,
    groups: int,
    layout: Layout,
) -> Later[Tensor]:
    """Return this tile's rows of a convolution, which are there once all tiles have come.

    Args:
        here: The tiles along the split dim.
        func: The convolution.
        x: The tile.
        parameters: The weight and the bias, which all tiles have in common.
        windows: The windows along all spatial dims.
        w: The one that reads rows of other tiles.
        groups: The number of groups of channels.
        layout: That of the result.
    """
    window = w.kernel, w.stride, w.before, w.dilation
    along = x.layout.with_dim(w.dim, layout.shape[w.dim])
    needs, before, rows = window_plan(x.shape[w.dim], along, w.dim, window)
    route = route_of(x, w.dim, needs)
    read = sum(route.receives[peer][number] for peer, number in route.order)
    own = _Member(
        in_memory(x.local), route, before, max(rows - before - read, 0), layout.local_shape
    )
    numbers = Numbers(
        w.dim,
        [each.stride for each in windows],
        [0 if each.dim == w.dim else each.before for each in windows],
        [each.dilation for each in windows],
        groups,
        here.moves,
    )

    def compute(members: list[_Member]) -> list[Tensor]:
        reads = reads_of(tuple([m.route for m in members]))
        plans = [_Plan(each, *m[2:]) for each, m in zip(reads, members, strict=True)]
        locals_ = [m.local for m in members]
        return [*_Convolution.apply(func, plans, numbers, *parameters, *locals_)]

    return here.later(own, compute)


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        func: Callable[..., Tensor],
        plans: list[_Plan],
        numbers: Numbers,
        weight: Tensor,
        bias: Tensor | None,
        *locals_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, bias, *locals_)
        ctx.plan = func, plans, numbers
        return tuple(_results(func, plans, numbers, (weight, bias), locals_))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight, bias, *locals_), (func, plans, numbers) = ctx.saved_tensors, ctx.plan
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():  # they are to be differentiated again
            given = weight, bias, *locals_
            results = _results(func, plans, numbers, (weight, bias), locals_)
            ends = [(y, g) for y, g in zip(results, grads, strict=True) if y.requires_grad]
            starts = [x for x, wants in zip(given, wanted, strict=True) if wants]
            if not ends:  # no tile has rows
                return None, None, None, *[None] * len(given)
            outputs, seeds = zip(*ends, strict=True)
            again = torch.autograd.grad(
                outputs, starts, seeds, create_graph=True, allow_unused=True
            )
            found = iter(again)
            return None, None, None, *(next(found) if wants else None for wants in wanted)
        wants = any(wanted[2:]), wanted[0], wanted[1]
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        arriving = _Arriving(locals_, plans, numbers)
        sources = _sources(locals_, plans, numbers)
        for tile, (grad, plan) in enumerate(zip(grads, plans, strict=True)):
            if 0 in plan.shape:
                continue
            rows = _rows(sources, tile, plan)
            found = _gradients(
                grad, rows, weight, [len(weight)], numbers.stride, numbers.padding,
                numbers.dilation, False, [0] * len(numbers.stride), numbers.groups, [*wants],
            )  # fmt: skip
            of_weight, of_bias = _added(of_weight, found[1]), _added(of_bias, found[2])
            if wants[0]:
                arriving.bring(tile, found[0])
        of_locals = arriving.of_all() if wants[0] else locals_
        chosen = [x if want else None for x, want in zip(of_locals, wanted[2:], strict=True)]
        rounded = [None if g is None else g.to(weight.dtype) for g in (of_weight, of_bias)]
        return None, None, None, *rounded, *chosen


class _Arriving:
    """Adds up what arrives at the rows of each tile, as soon as the last piece is there.

    Args:
        locals_: The rows of each tile.
        plans: The rows that each tile reads.
        numbers: The numbers of the convolution.
    """

    def __init__(self, locals_: Sequence[Tensor], plans: Sequence[_Plan], numbers: Numbers) -> None:
        self._locals, self._plans, self._numbers = locals_, plans, numbers
        self._pieces: list[list[tuple[int, Tensor]]] = [[] for _ in locals_]
        self._found: list[Tensor | None] = [None] * len(locals_)
        readers = [n for n, plan in enumerate(plans) if 0 not in plan.shape]
        self._last = {peer: n for n in readers for peer, _, _ in plans[n].reads}

    def bring(self, tile: int, gradient: Tensor) -> None:
        """Keep the gradient of the rows that a tile has read."""
        dim, place = self._numbers.dim, self._plans[tile].before
        for peer, start, size in self._plans[tile].reads:
            piece = gradient.narrow(dim, place, size)
            piece = piece.clone() if self._numbers.moves and peer != tile else piece
            self._pieces[peer].append((start, piece))
            place += size
        for peer in [peer for peer, reader in self._last.items() if reader == tile]:
            self._add_up(peer)

    def of_all(self) -> list[Tensor | None]:
        """Return the gradient of each tile's rows, also of those that nobody has read."""
        for tile, found in enumerate(self._found):
            if found is None:
                self._add_up(tile)
        return self._found

    def _add_up(self, tile: int) -> None:
        """Add the pieces up; the one that has all rows is written."""
        x, dim, parts = self._locals[tile], self._numbers.dim, self._pieces[tile]
        whole = next((part for _, part in parts if part.shape[dim] == x.shape[dim]), None)
        total = torch.zeros_like(x) if whole is None else whole
        for start, part in parts:
            if part is not whole and part.shape[dim]:
                total.narrow(dim, start, part.shape[dim]).add_(part)
        self._found[tile] = total
        self._pieces[tile] = []


def _results(
    func: Callable[..., Tensor],
    plans: list[_Plan],
    numbers: Numbers,
    parameters: tuple[Tensor, Tensor | None],
    locals_: Sequence[Tensor],
) -> list[Tensor]:
    """Convolve the rows of each tile."""
    (weight, bias), others = parameters, numbers[1:5]
    sources = _sources(locals_, plans, numbers)
    results = [
        locals_[0].new_empty(plan.shape)
        if 0 in plan.shape
        else func(_rows(sources, tile, plan), weight, bias, *others)
        for tile, plan in reversed([*enumerate(plans)])  # the last tile was computed last
    ]
    return results[::-1]


def _sources(locals_: Sequence[Tensor], plans: Sequence[_Plan], numbers: Numbers) -> Sources:
    return Sources(locals_, numbers.dim, [plan.reads for plan in plans], moves=numbers.moves)


def _rows(sources: Sources, tile: int, plan: _Plan) -> Tensor:
    """Put the rows of one tile together, with those of its neighbours, and zeros at the edges.

    They lie in the format of the tile's own rows, which torch's convolutions keep.
    """
    own = sources.given[tile]
    parts, stored, shape = sources.read_by(tile), format_of(own), [*own.shape]
    for number, place in ((plan.before, 0), (plan.after, len(parts) + 1)):
        if number:
            shape[sources.dim] = number
            parts.insert(place, own.new_zeros(shape))
    if torch.is_grad_enabled():
        return torch.cat(parts, sources.dim).contiguous(memory_format=stored)
    return joined(parts, sources.dim, stored)


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return None if part is None else wide(part)
    return total.add_(part)
