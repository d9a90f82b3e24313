"""Cumulative functions scan locally, then take in the carry of the ranks before this one."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import one_factor
from lightning_shard.domain.fetch import fetch_all
from lightning_shard.domain.half import HALF, wide
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import cast_for, of_one, uncast
from lightning_shard.ops.registry import implements


def _log_total(x: Tensor, dim: int) -> Tensor:
    """Return `logsumexp` as one row; the gradient of -inf alone is 0, and in torch NaN."""
    is_nothing = (x == -math.inf).all(dim, keepdim=True)
    return (
        x.masked_fill(is_nothing, 0).logsumexp(dim, keepdim=True).masked_fill(is_nothing, -math.inf)
    )


# total of rows (kept as one row), carry joined with later rows; None: the carry is scanned, too
_Scan = tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, Tensor], Tensor] | None]
_SUM: _Scan = (lambda x, dim: x.sum(dim, keepdim=True), torch.add)
_PRODUCT: _Scan = (lambda x, dim: x.prod(dim, keepdim=True), torch.mul)
_LOG_SUM: _Scan = (_log_total, None)
_SCANS: dict[Callable[..., Any], _Scan] = {
    torch.cumsum: _SUM, Tensor.cumsum: _SUM,
    torch.cumprod: _PRODUCT, Tensor.cumprod: _PRODUCT,
    torch.logcumsumexp: _LOG_SUM, Tensor.logcumsumexp: _LOG_SUM,
}  # fmt: skip


@implements(*_SCANS)
def scan(
    func: Callable[..., Tensor], x: Subdomain, dim: int, *, dtype: torch.dtype | None = None
) -> Subdomain:
    """Cumulative function; the totals of earlier ranks travel if `dim` is split."""
    if dtype is None:
        (x,) = cast_for(of_one(func, -1), x)
    return _scan(func, x, x.layout.dim(dim), dtype)


@uncast
def _scan(
    func: Callable[..., Tensor], x: Subdomain, d: int, dtype: torch.dtype | None
) -> Subdomain:
    total, join = _SCANS[func]
    if not x.layout.axes(d):
        return x.like(func(x.local, d, **({"dtype": dtype} if dtype else {})))
    x = one_factor(x if dtype is None else x.like(x.local.to(dtype)), d)
    rows = wide(x.local)
    # for the first rows it is empty, and its total joins nothing; yet its graph is the others'
    totals = one_of_each(x, d, total(rows, d))
    before = totals.narrow(d, 0, x.layout.grid.index(x.layout.axes(d)))
    named = {"dtype": rows.dtype} if dtype else {}
    if join is None:
        found = _logs_after(before, rows, lambda all_rows: func(all_rows, d, **named), d)
    else:
        found = join(func(rows, d, **named), total(before, d))
    return x.like(found.to(x.dtype) if x.dtype in HALF else found)


def _logs_after(
    before: Tensor, rows: Tensor, scan_rows: Callable[[Tensor], Tensor], d: int
) -> Tensor:
    """Scan rows after a carry, which is one row more.

    Torch takes the logarithm of the gradient that comes, and that of 0 has no derivative. So the
    gradient that comes is the caller's own, which no sum with the carry has changed.
    """
    if before.shape[d]:
        whole = torch.cat([_log_total(before, d), rows], d)
        return scan_rows(whole).narrow(d, 1, rows.shape[d]).clone()
    # as on other ranks, the gradient of what travels depends on the rows
    return scan_rows(rows) + before.sum(d, keepdim=True) * rows.where(rows.isfinite(), 0)


def one_of_each(x: Subdomain, dim: int, row: Tensor) -> Tensor:
    """Gather the one row of `dim` of every rank that splits `dim` of `x`, in order."""
    axes = x.layout.axes(dim)
    layout = x.layout.with_dim(dim, x.layout.grid.parts(axes), axes)
    return fetch_all(x.like(row, layout), dim)
