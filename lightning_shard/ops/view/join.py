"""Joins tensors: along whole dims locally; along a split dim each rank fetches its output rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import (
    all_in_rows,
    broadcasting,
    common_layout,
    local_part,
    one_factor,
)
from lightning_shard.domain.empty_ranks import concatenated
from lightning_shard.domain.fetch import Span, fetch, needs_of
from lightning_shard.domain.layout import Factor, Layout, layout_of
from lightning_shard.domain.strides import Strides, of_joined, of_whole
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import composes, implements
from lightning_shard.ops.view.reshape import unsqueeze
from lightning_shard.processes.torch_private.internals import functions_of_cpp

Operand = Subdomain | Tensor


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(func: Callable[..., Any], tensors: Sequence[Operand], dim: int = 0, **kwargs: Any) -> Any:
    """Join tensors; rows travel to the owners in the longer dim if it is split."""
    dim = kwargs.get("axis", dim)
    joined = [t for t in tensors if tuple(t.shape) != (0,)]  # torch leaves these out, of any rank
    tensors = joined or tensors
    first = next((t for t in tensors if isinstance(t, Subdomain)), None)
    if first is None:
        return torch.cat([t for t in tensors if isinstance(t, Tensor)], dim)
    dim = first.layout.dim(dim)
    layout = _without(tensors, dim)
    axes = _axes_of_joined(tensors, dim, layout)
    target = layout.with_dim(dim, sum([t.shape[dim] for t in tensors]), axes)
    start = 0
    parts: list[Tensor] = []
    for t in tensors:
        local = (
            local_part(t, layout.with_dim(dim, t.shape[dim], ()))
            if not axes
            else _rows(t, dim, start, target)
        )
        parts.append(local)
        start += t.shape[dim]
    sources = [t.local if isinstance(t, Subdomain) else t for t in tensors]
    found = concatenated(parts, dim, sources)
    return Subdomain(found, target, first.domain, None, _strides(tensors, dim, found, target))


def _strides(tensors: Sequence[Operand], dim: int, found: Tensor, layout: Layout) -> Strides | None:
    """Strides of the whole result, where the parts lie as it does.

    Of turned tensors torch also asks for the strides of dims of one row, which are not exact here.
    """
    if all_in_rows(tensors):
        return layout.strides
    strides = [t.stride() if isinstance(t, Tensor) else t.strides for t in tensors]
    known = [
        (tuple(t.shape), own)
        for t, own in zip(tensors, strides, strict=True)
        if own is not None and 1 not in t.shape
    ]
    whole = of_joined(dim, *known) if len(known) == len(tensors) else None
    strides = of_whole(tuple(found.shape), found.stride(), layout)
    return whole if whole == strides else None


def _axes_of_joined(tensors: Sequence[Operand], dim: int, layout: Layout) -> tuple[int, ...]:
    """The mesh axes that split the joined `dim`: those of the operands, if they agree.

    None where `layout`, of the other dims, has one of them: an axis splits one dim only.
    """
    kinds = {t.layout.axes(dim) for t in tensors if isinstance(t, Subdomain)} - {()}
    if len(kinds) != 1 or set(*kinds) & set(layout.axes()):
        return ()
    return kinds.pop()


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
        t = one_factor(t, dim)
        rows = fetch(t, dim, needs_of(factor.extent, grid.parts(factor.axes), inside))
        t = t.like(rows, t.layout.with_dim(dim, t.shape[dim], ()))
        return local_part(t, own)
    first, last = (inside(low, high) or [(0, 0)])[0]
    return local_part(t, own).narrow(dim, first, last - first)


@implements(torch.stack)
def stack(func: Callable[..., Any], tensors: Sequence[Operand], dim: int = 0) -> Any:
    """Join tensors along a new dim, which is whole; nothing travels."""
    d = dim % (tensors[0].ndim + 1)
    first = next((t for t in tensors if isinstance(t, Subdomain)), None)
    if first is None:
        return torch.stack([t for t in tensors if isinstance(t, Tensor)], d)
    sizes = [tuple(t.shape) for t in tensors]
    if len({*sizes}) > 1:  # torch's words; parts of one rank may be of one size by chance
        raise RuntimeError(f"stack expects each tensor to be equal size, but got {sizes}")
    layout = common_layout(tensors)
    # torch's own: it lies as in one process, with real and imaginary parts side by side
    joined = torch.stack([local_part(t, layout) for t in tensors], d)
    dims = (*layout.dims[:d], (Factor(len(tensors)),), *layout.dims[d:])
    return first.like(joined, layout_of(dims, layout.grid))


@dataclass(frozen=True)
class _Stacking:
    """The way in which a function of numpy joins: along `dim`, with at least so many dims."""

    least: int
    dim: int
    columns: bool = False


_STACKINGS: dict[Callable[..., Any], _Stacking] = {
    torch.hstack: _Stacking(least=1, dim=1),
    torch.column_stack: _Stacking(least=2, dim=1, columns=True),
    torch.vstack: _Stacking(least=2, dim=0),
    torch.row_stack: _Stacking(least=2, dim=0),
    torch.dstack: _Stacking(least=3, dim=2),
}


@implements(*_STACKINGS)
def stack_by_name(func: Callable[..., Any], tensors: Sequence[Operand]) -> Any:
    """Tensors of fewer dims get dims of extent 1 first, as numpy has it."""
    stacking = _STACKINGS[func]
    raised = [_raised(t, stacking.least, columns=stacking.columns) for t in tensors]
    return cat(torch.cat, raised, min(raised[0].ndim - 1, stacking.dim))


def _raised(x: Operand, least: int, *, columns: bool) -> Operand:
    """A row is (1, n) and (1, n, 1); for `column_stack` a column (n, 1)."""
    while x.ndim < least:
        at = x.ndim if columns or x.ndim == 2 else 0
        x = unsqueeze(torch.unsqueeze, x, at) if isinstance(x, Subdomain) else x.unsqueeze(at)
    return x


@composes(functions_of_cpp.pad_sequence)
def pad_sequence(
    func: Callable[..., Any],
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """Pad each sequence to the longest, as `F.pad` does, and stack them along a new dim."""
    longest = max(len(x) for x in sequences)
    left = padding_side == "left"
    padded: list[Tensor] = []
    for x in sequences:
        lacks = longest - len(x)
        sides = [*[0] * 2 * (x.ndim - 1), lacks * left, lacks * (not left)]
        padded.append(F.pad(x, sides, value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)
