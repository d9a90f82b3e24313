"""Makes collectives on plain tensors differentiable, each by its true adjoint.

| primitive                  | this rank gets                           | adjoint       |
| -------------------------- | ---------------------------------------- | ------------- |
| exchange(x, dim, route)    | pieces of other ranks' rows              | add_to_owners |
| add_to_owners(y, dim, ...) | its rows, summed over what others return | exchange      |
| all_reduce(x)              | the sum over ranks                       | all_reduce    |
| transpose(x, a, b, ...)    | dim b whole instead of dim a             | transpose     |

A gather is an exchange in which every rank wants every row; its adjoint is the reduce-scatter. One
duality holds everywhere: the cotangent of a split tensor is split, that of a replicated tensor is a
partial sum. So a replicated loss whose backward starts on every rank gives parameter gradients
whose *mean* over the ranks is the gradient, whichever operations lie between.

The group is always an argument and the device is the tensor's: nothing here knows a default.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain import together
from lightning_shard.domain.forward_mode import refuse_tangent, with_tangent
from lightning_shard.domain.half import wide
from lightning_shard.domain.local_group import joining, rank_in, ranks_in
from lightning_shard.domain.memory_format import empty, format_of, joined, owned
from lightning_shard.domain.together import Route
from lightning_shard.domain.wire import all_gather, all_to_all, packed, reduce_in_place
from lightning_shard.processes.torch_private.internals import in_memory


def exchange(x: Tensor, dim: int, route: Route, group: dist.ProcessGroup) -> Tensor:
    """Bring the pieces of all ranks' rows along `dim` that `route` names, put together in order."""
    if not route.moves:
        rank = rank_in(group)
        return _join(x, dim, [x.narrow(dim, start, size) for start, size in route.sends[rank]])
    here = joining(group)
    if here is not None:
        return here.together(
            (in_memory(x), route), partial(together.exchanged, dim=dim, moves=here.moves)
        )
    return _Exchange.apply(with_tangent(x), dim, route, group)


def add_to_owners(y: Tensor, dim: int, rows: int, route: Route, group: dist.ProcessGroup) -> Tensor:
    """Send each piece of `y` back along `route`; the owners, of `rows` rows each, add them up."""
    return _ExchangeAdjoint.apply(with_tangent(y), dim, rows, route, group)


def transpose(
    x: Tensor,
    split: int,
    join: int,
    split_sizes: Sequence[int],
    join_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """All-to-all: from whole in dim `split` and parted in dim `join` to the other way round.

    Args:
        x: This rank's part, `sum(split_sizes)` x `join_sizes[rank]` in these dims.
        split: The dim that is parted.
        join: The dim that becomes whole.
        split_sizes: Each rank's part of `split` afterwards.
        join_sizes: Each rank's part of `join` before.
        group: The ranks.

    Returns:
        `split_sizes[rank]` x `sum(join_sizes)` in these dims.
    """
    if len(split_sizes) == 1:
        return x
    here = joining(group)
    if here is not None:
        return here.together(
            in_memory(x),
            partial(together.transposed, split=split, join=join, split_sizes=split_sizes),
        )
    sizes = tuple(split_sizes), tuple(join_sizes)
    return _Transpose.apply(with_tangent(x), split, join, *sizes, group)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add `x` up over the ranks, on every rank."""
    if ranks_in(group) == 1:
        return x
    here = joining(group)
    if here is not None:
        return here.together(x, together.summed)
    return _AllReduce.apply(with_tangent(x), group)


def all_mean(x: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    """Average `x` over so many ranks, on every rank; half precision is added up in float32."""
    return (all_reduce(wide(x), group) / ranks).to(x.dtype)


def all_reduce_extreme(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    """Find the elementwise `ReduceOp.MAX` or `MIN` over the ranks; it carries no gradient.

    It is NaN where a rank has NaN, which travels beside the values: backends lose it, or keep it on
    some of the ranks.
    """
    refuse_tangent(x)
    if not x.is_floating_point():
        result = x.detach().clone(memory_format=torch.contiguous_format)
        reduce_in_place(result, op, group)
        return result
    worst = -math.inf if op == dist.ReduceOp.MAX else math.inf
    nans = x.detach().isnan()
    both = torch.stack([x.detach().masked_fill(nans, worst), torch.where(nans, -worst, worst)])
    reduce_in_place(both, op, group)
    return both[0].masked_fill(both[1] == -worst, math.nan)


def of_all(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the `part`s of all ranks, alike in shape, stacked in order, without a gradient."""
    return all_gather(part.detach() if part.requires_grad else part, ranks_in(group), group)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, route: Route, group: dist.ProcessGroup) -> Tensor:
        ctx.plan, x = (dim, x.shape[dim], route, group), in_memory(x)
        pieces = [[x.narrow(dim, start, size) for start, size in peer] for peer in route.sends]
        received = _swap(pieces, route.receives, x, dim, group)
        parts = [received[peer][number] for peer, number in route.order]
        stored = format_of(x)
        result = joined(parts, dim, stored) if parts else empty(x, _with_size(x, dim, 0), stored)
        return owned(result, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dim, rows, route, group = ctx.plan
        return add_to_owners(grads[0], dim, rows, route, group), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        dim, _, route, group = ctx.plan
        return _Exchange.apply(tangents[0], dim, route, group)


class _ExchangeAdjoint(Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, dim: int, rows: int, route: Route, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.plan, ctx.rows, y = (dim, route, group), rows, in_memory(y)
        lengths = [route.receives[peer][number] for peer, number in route.order]
        pieces: list[list[Tensor]] = [[y] * len(peer) for peer in route.receives]
        for (peer, number), piece in zip(
            route.order, y.split_with_sizes(lengths, dim), strict=True
        ):
            pieces[peer][number] = piece
        sizes = tuple(tuple(size for _, size in peer) for peer in route.sends)
        swapped = _swap(pieces, sizes, y, dim, group)
        each = zip(itertools.chain(*route.sends), itertools.chain(*swapped), strict=True)
        return _added(y, dim, rows, [(start, part) for (start, _), part in each])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Exchange.apply(with_tangent(grads[0]), *ctx.plan), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        dim, route, group = ctx.plan
        return _ExchangeAdjoint.apply(tangents[0], dim, ctx.rows, route, group)


class _Transpose(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        split: int,
        join: int,
        split_sizes: tuple[int, ...],
        join_sizes: tuple[int, ...],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.plan, x = (join, split, join_sizes, split_sizes, group), in_memory(x)
        pieces = x.split_with_sizes(split_sizes, split)
        mine = pieces[rank_in(group)]
        sizes = [(n,) for n in join_sizes]
        received = _swap([(p,) for p in pieces], sizes, mine, join, group)
        return owned(joined([part for (part,) in received], join, format_of(x)), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Transpose.apply(with_tangent(grads[0]), *ctx.plan), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        join, split, join_sizes, split_sizes, group = ctx.plan
        return _Transpose.apply(tangents[0], split, join, split_sizes, join_sizes, group)


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        result = x.clone(memory_format=torch.contiguous_format)
        real = torch.view_as_real(result) if result.is_complex() else result
        reduce_in_place(real, dist.ReduceOp.SUM, group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce(grads[0], ctx.group), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _AllReduce.apply(tangents[0], ctx.group)


def _swap(
    pieces: Sequence[Sequence[Tensor]],
    sizes: Sequence[Sequence[int]],
    like: Tensor,
    dim: int,
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:
    """All-to-all: `pieces[p]` go to peer p; from peer p come pieces like `like`, `sizes[p]` long.

    My own pieces stay where they are.
    """
    rank = rank_in(group)
    mine = [
        piece
        for peer, parts in enumerate(pieces)
        for piece in parts
        if peer != rank and piece.numel()
    ]
    outgoing = packed(mine, like)
    counts = [
        [_numel(like, dim, n) if peer != rank else 0 for n in lengths]
        for peer, lengths in enumerate(sizes)
    ]
    given = [sum(p.numel() for p in parts) * (k != rank) for k, parts in enumerate(pieces)]
    incoming = all_to_all(outgoing, [sum(peer) for peer in counts], given, group)
    arrived = iter(incoming.split_with_sizes([n for peer in counts for n in peer]))
    received = [
        [next(arrived).view(_with_size(like, dim, n if peer != rank else 0)) for n in lengths]
        for peer, lengths in enumerate(sizes)
    ]
    received[rank] = list(pieces[rank])
    return received


def _added(like: Tensor, dim: int, rows: int, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The sum of parts that begin at given rows; in memory of its own.

    Parts that have all rows come first: what they begin with needs no zeros.
    """
    whole = [part for _, part in parts if part.shape[dim] == rows]
    stored = format_of(like)
    if len(whole) > 1 and stored == torch.contiguous_format:
        x, whole = whole[0] + whole[1], whole[1:]
    elif whole:
        x = whole[0].clone(memory_format=stored)
    else:
        x = empty(like, _with_size(like, dim, rows), stored).zero_()
    for part in whole[1:]:
        x += part
    for start, part in parts:
        if part.shape[dim] < rows:
            x.narrow(dim, start, part.shape[dim]).add_(part)
    return x


def _join(x: Tensor, dim: int, pieces: list[Tensor]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)


def _with_size(x: Tensor, dim: int, size: int) -> list[int]:
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


def _numel(x: Tensor, dim: int, size: int) -> int:
    return torch.Size(_with_size(x, dim, size)).numel()
