"""Concatenation: along whole dims locally; along a split dim each rank fetches its output rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain import Subdomain
from lightning_shard.halo import Span, concatenated, fetch, needs_of
from lightning_shard.layout import Layout
from lightning_shard.ops.align import broadcasting, common_layout, local_part, simple
from lightning_shard.ops.registry import implements, wrapped
from lightning_shard.ops.view import unsqueeze

Operand = Subdomain | Tensor


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(func: Callable[..., Any], tensors: Sequence[Operand], dim: int = 0, **kwargs: Any) -> Any:
    dim = kwargs.get("axis", dim)
    joined = [t for t in tensors if tuple(t.shape) != (0,)]  # torch leaves these out, of any rank
    tensors = joined or tensors
    first = next((t for t in tensors if isinstance(t, Subdomain)), None)
    if first is None:
        return torch.cat([wrapped(t) for t in tensors], dim)
    dim = first.layout.dim(dim)
    axes = next(
        (t.layout.axes(dim) for t in tensors if isinstance(t, Subdomain) and t.layout.axes(dim)), ()
    )
    layout = _without(tensors, dim)
    extent = sum(t.shape[dim] for t in tensors)
    target = layout.with_dim(dim, extent, axes)
    parts, start = [], 0
    for t in tensors:
        local = (
            local_part(t, layout.with_dim(dim, t.shape[dim], ()))
            if not axes
            else _rows(t, dim, start, target)
        )
        parts.append(local)
        start += t.shape[dim]
    return first.like(concatenated(parts, dim), target)


def _without(tensors: Sequence[Operand], dim: int) -> Layout:
    """The common layout of all dims but `dim`."""
    return common_layout([broadcasting(t, {dim}) for t in tensors])


def _rows(t: Operand, dim: int, start: int, target: Layout) -> Tensor:
    """The rows of `t`, which begin at `start` of the result, that this rank's output holds."""
    own = target.with_dim(dim, t.shape[dim], ())
    (factor,) = target.dims[dim]
    grid = target.grid

    def inside(low: int, high: int) -> list[Span]:
        first, last = max(low - start, 0), min(high - start, t.shape[dim])
        return [(first, last)] if first < last else []

    low, high = factor.bounds(grid)
    if isinstance(t, Subdomain) and t.layout.axes(dim):
        t = simple(t, dim)
        rows = fetch(t, dim, needs_of(factor.extent, grid.parts(factor.axes), inside))
        t = t.like(rows, t.layout.with_dim(dim, t.shape[dim], ()))
        return local_part(t, own)
    first, last = (inside(low, high) or [(0, 0)])[0]
    return local_part(t, own).narrow(dim, first, last - first)


@implements(torch.stack)
def stack(func: Callable[..., Any], tensors: Sequence[Operand], dim: int = 0) -> Any:
    d = dim % (tensors[0].ndim + 1)
    raised = [
        unsqueeze(func, t, d) if isinstance(t, Subdomain) else t.unsqueeze(d) for t in tensors
    ]
    return cat(torch.cat, raised, d)


@implements(torch.hstack, torch.column_stack, torch.vstack, torch.row_stack, torch.dstack)
def stack_by_name(func: Callable[..., Any], tensors: Sequence[Operand]) -> Any:
    """Tensors of fewer dims get dims of extent 1 first, as numpy has it."""
    name = func.__name__
    least = {"hstack": 1, "dstack": 3}.get(name, 2)
    raised = [_raised(t, least, columns=name == "column_stack") for t in tensors]
    dim = {"hstack": min(raised[0].ndim - 1, 1), "column_stack": 1, "dstack": 2}.get(name, 0)
    return cat(torch.cat, raised, dim)


def _raised(x: Operand, least: int, *, columns: bool) -> Operand:
    """A row is (1, n) and (1, n, 1); for `column_stack` a column (n, 1)."""
    while x.ndim < least:
        at = x.ndim if columns or x.ndim == 2 else 0
        x = unsqueeze(torch.unsqueeze, x, at) if isinstance(x, Subdomain) else x.unsqueeze(at)
    return x
