"""Rolls, mirrors and turns rows, and takes differences of neighbouring rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import in_own_memory, one_factor
from lightning_shard.domain.fetch import fetch, needs_of
from lightning_shard.domain.memory_format import laid_by
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.elementwise.pointwise import pointwise
from lightning_shard.ops.registry import implements
from lightning_shard.ops.view.index import chosen_rows, strided
from lightning_shard.ops.view.join import cat
from lightning_shard.ops.view.permute import transpose
from lightning_shard.ops.view.reshape import reshape_to


@implements(torch.roll, Tensor.roll)
def roll(func: Callable[..., Any], x: Subdomain, shifts: Any, dims: Any = None) -> Subdomain:
    """Shift rows around the ends; rows travel to their new owners if the dim is split."""
    if 0 in x.shape:
        return in_own_memory(x, x)
    if dims is None or dims in ((), []):
        return reshape_to(roll(func, reshape_to(x, [-1]), shifts, 0), x.shape)
    given = x
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    for shift, dim in zip(shifts, map(x.layout.dim, dims), strict=True):
        if x.layout.axes(dim):
            n = x.shape[dim]
            x = chosen_rows(x, dim, n, lambda o, n=n, shift=shift: (o - shift) % n)
        else:
            x = x.like(x.local.roll(shift, dim))
    return in_own_memory(x, given)


@implements(torch.flip, Tensor.flip)
def flip(func: Callable[..., Any], x: Subdomain, *places: Any, dims: Any = ()) -> Subdomain:
    """Reverse rows; they travel to their new owners if the dim is split."""
    dims = places or dims
    dims = dims[0] if dims and isinstance(dims[0], Sequence) else dims
    if not dims:
        return in_own_memory(x, x)
    for dim in map(x.layout.dim, dims):
        n, axes = x.shape[dim], x.layout.axes(dim)
        local = x.local
        if axes:
            x = one_factor(x, dim)
            needs = needs_of(
                n, x.layout.grid.parts(axes), lambda low, high, n=n: [(n - high, n - low)]
            )
            local = laid_by(fetch(x, dim, needs), local.stride())
        x = x.like(local.flip(dim))
    return x


@implements(torch.fliplr, Tensor.fliplr)
def fliplr(func: Callable[..., Any], x: Subdomain) -> Subdomain:
    """Reverse the second dim; rows travel as for `flip`."""
    return flip(torch.flip, x, [1])


@implements(torch.flipud, Tensor.flipud)
def flipud(func: Callable[..., Any], x: Subdomain) -> Subdomain:
    """Reverse the first dim; rows travel as for `flip`."""
    return flip(torch.flip, x, [0])


@implements(torch.rot90, Tensor.rot90)
def rot90(
    func: Callable[..., Any], x: Subdomain, k: int = 1, dims: Sequence[int] = (0, 1)
) -> Subdomain:
    """Turn a plane by quarters; rows travel as for `flip`."""
    a, b = map(x.layout.dim, dims)
    if k % 4 == 2:
        return flip(torch.flip, x, [a, b])
    if k % 4 == 1:
        return transpose(torch.transpose, flip(torch.flip, x, [b]), a, b)
    return (
        flip(torch.flip, transpose(torch.transpose, x, a, b), [b])
        if k % 4
        else x.like(x.local.clone())
    )


@implements(torch.diff, Tensor.diff)
def diff(
    func: Callable[..., Any],
    x: Any,
    n: int = 1,
    dim: int = -1,
    prepend: Any = None,
    append: Any = None,
) -> Any:
    """Differences of neighbouring rows; rows travel to the owners in the shorter dim."""
    d = dim % x.ndim
    if not n:
        return in_own_memory(x, x) if isinstance(x, Subdomain) else x.clone()
    pieces = [t for t in (prepend, x, append) if t is not None]
    x = cat(torch.cat, pieces, d) if len(pieces) > 1 else x
    step = torch.ne if x.dtype == torch.bool else torch.sub
    for _ in range(min(n, x.shape[d])):
        x = pointwise(
            step, strided(x, d, range(1, x.shape[d])), strided(x, d, range(x.shape[d] - 1))
        )
    return x
