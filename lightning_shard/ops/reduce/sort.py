"""Order statistics run locally along whole dims; `topk` of a split dim compares the ranks' best.

A sort, a median or a quantile over a split dim needs all its rows in order on one rank: an
all-to-all moves the split to another dim. Where there is no other dim, ranks compare samples, and
together put the one row in order (sort_rows.py, ranked.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import gathered, one_factor, split_moved
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import fetch_all
from lightning_shard.domain.layout import Factor, Layout, partition
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.reduce.ranked import kth_of_row, quantile_of_row
from lightning_shard.ops.reduce.sort_rows import sorted_rows
from lightning_shard.ops.registry import implements, name_of

_ORDERED = "over a split dim only if another dim of 2 or more rows is whole"
_ONE_ROW = f"{_ORDERED}, or it is the only one"


@implements(torch.sort, Tensor.sort, torch.argsort, Tensor.argsort, limits=_ONE_ROW)
def sort(func: Callable[..., Any], x: Subdomain, *args: Any, **kwargs: Any) -> Any:
    """Sort along a whole dim; of one long split row, rows travel to their places in the order."""
    return _sorted_along(func, x, _named_dim(args, kwargs, -1), *args, **kwargs)


@implements(torch.cummax, Tensor.cummax, torch.cummin, Tensor.cummin, limits=_ORDERED)
def ordered(func: Callable[..., Any], x: Subdomain, *args: Any, **kwargs: Any) -> Any:
    """Apply a function along one whole dim that keeps the shape."""

    def extremes(rows: Tensor) -> Any:
        found = func(rows, *args, **kwargs)
        # torch's gradient of nothing has no graph, which a second backward pass would lack
        return found if rows.numel() else type(found)((rows.clone(), found.indices))

    return _ordered_along(func, x, _named_dim(args, kwargs, -1), extremes)


@implements(torch.msort, Tensor.msort, limits=_ONE_ROW)
def msort(func: Callable[..., Any], x: Subdomain) -> Any:
    """Sort along the first dim; the same travels as for `sort`."""
    return _sorted_along(func, x, 0)


def _sorted_along(
    func: Callable[..., Any], x: Subdomain, along: int | None, *args: Any, **kwargs: Any
) -> Any:
    d = _sorted_dim(func, x, along)
    if _is_one_row(x, d):
        return _sorted_row(func, x, d, descending=_is_descending(args, kwargs))
    return _ordered_along(func, x, along, lambda rows: func(rows, *args, **kwargs))


def _ordered_along(
    func: Callable[..., Any], x: Subdomain, along: int | None, of_rows: Callable[[Tensor], Any]
) -> Any:
    d = _sorted_dim(func, x, along)
    other = _spare_dim(func, x, d)
    turned = x if other is None else split_moved(x, d, other)
    found = of_rows(turned.local)

    def own(value: Tensor) -> Subdomain:
        return turned.like(value) if other is None else split_moved(turned.like(value), other, d)

    return own(found) if isinstance(found, Tensor) else type(found)([own(f) for f in found])


def _is_one_row(x: Subdomain, dim: int) -> bool:
    """Return True if `dim` is split, and all others are of extent 1 and whole."""
    others = [d for d in range(x.ndim) if d != dim]
    alone = all(x.shape[d] == 1 and not x.layout.axes(d) for d in others)
    return alone and bool(x.layout.axes(dim))


def _is_descending(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("descending", args[1] if len(args) > 1 else False))


def _sorted_row(func: Callable[..., Any], x: Subdomain, dim: int, *, descending: bool) -> Any:
    x = one_factor(x, dim)
    row = Layout((x.layout.dims[dim],), x.layout.grid)
    found = sorted_rows(x.like(x.local.reshape(-1), row), descending=descending)
    values, places = (x.like(f.local.reshape(x.local.shape)) for f in found)
    if func in (torch.argsort, Tensor.argsort):
        return places
    if func in (torch.msort, Tensor.msort):
        return values
    kind: Any = torch.return_types.sort
    return kind((values, places))


@dataclass(frozen=True)
class _Statistic:
    """The argument that comes before `dim`, if any, and the dim where none is named."""

    leading: str | None = None
    default_dim: int | None = None


_MEDIAN, _MODE = _Statistic(), _Statistic(default_dim=-1)
_KTH, _QUANTILE = _Statistic("k", default_dim=-1), _Statistic("q")
_STATISTICS: dict[Callable[..., Any], _Statistic] = {
    torch.median: _MEDIAN, Tensor.median: _MEDIAN,
    torch.nanmedian: _MEDIAN, Tensor.nanmedian: _MEDIAN,
    torch.mode: _MODE, Tensor.mode: _MODE,
    torch.kthvalue: _KTH, Tensor.kthvalue: _KTH,
    torch.quantile: _QUANTILE, Tensor.quantile: _QUANTILE,
    torch.nanquantile: _QUANTILE, Tensor.nanquantile: _QUANTILE,
}  # fmt: skip


@implements(*_STATISTICS, limits=_ONE_ROW)
def statistic(func: Callable[..., Any], x: Subdomain, *args: Any, **kwargs: Any) -> Any:
    """Reduce one whole dim; `quantile` of several q has them as the first dim."""
    kind = _STATISTICS[func]
    args = tuple(gathered(a) if isinstance(a, Subdomain) else a for a in args)
    kwargs = {n: gathered(a) if isinstance(a, Subdomain) else a for n, a in kwargs.items()}
    after_leading = args if kind.leading is None or kind.leading in kwargs else args[1:]
    asked = _named_dim(after_leading, kwargs, kind.default_dim)
    if kind is not _MODE and (asked is None or _is_one_row(x, x.layout.dim(asked))):
        return _of_one_row(func, x, asked, args, kwargs)
    d = _sorted_dim(func, x, asked)
    other = _spare_dim(func, x, d)
    x = x if other is None else split_moved(x, d, other)
    rows = (
        x.local if x.local.numel() else empty_attached([max(n, 1) for n in x.local.shape], x.local)
    )
    found = func(rows, *args, **kwargs)  # some of these functions refuse a tensor without elements

    def layout_of(value: Tensor) -> Layout:
        missing = x.ndim - value.ndim
        dims = list(x.layout.dims)
        dims[d : d + 1] = [(Factor(1),)]
        several = kind is _QUANTILE and _count(args, kwargs) is not None
        if missing + several:
            del dims[d]
        return Layout((*([(Factor(value.shape[0]),)] if several else []), *dims), x.layout.grid)

    def own(value: Tensor) -> Subdomain:
        layout = layout_of(value)
        for dim, n in enumerate(layout.local_shape):
            value = value.narrow(dim, 0, n)
        return x.in_any_order(value, layout)

    return own(found) if isinstance(found, Tensor) else type(found)([own(f) for f in found])


def _of_one_row(
    func: Callable[..., Any],
    x: Subdomain,
    dim: int | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Bind the arguments of a statistic of one row, or of all elements."""
    if 0 in x.shape:  # NaN, or torch's own error
        return func(x.local.new_zeros(x.shape), *args, **kwargs)
    kind = _STATISTICS[func]
    names = [*([kind.leading] if kind.leading else []), "dim", "keepdim"]
    given = dict(zip(names, args, strict=False)) | kwargs
    keepdim = bool(given.get("keepdim", False))
    if kind is _QUANTILE:
        given = {k: v for k, v in given.items() if k not in ("dim", "keepdim")}
        dims = x.ndim if keepdim else 0 if dim is None else x.ndim - 1
        return quantile_of_row(func, x, dims=dims, **given)
    return kth_of_row(func, x, dim, keepdim, given.get("k"))


@implements(torch.topk, Tensor.topk)
def topk(
    func: Callable[..., Any],
    x: Subdomain,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002 - torch's name of the argument
) -> Any:
    """The best of the ranks' own k best: each rank gets up to k rows of every other."""
    d = x.layout.dim(dim)
    if k > x.shape[d]:
        raise RuntimeError(f"selected index k out of range: {k} of {x.shape[d]} rows")
    layout = x.layout.with_dim(d, k, ())
    topk_type: Any = torch.return_types.topk
    if not x.layout.axes(d):
        return topk_type([x.like(f, layout) for f in func(x.local, k, d, largest, sorted)])
    x = one_factor(x, d)
    low, high = x.layout.dims[d][0].bounds(x.layout.grid)
    own = func(x.local, min(k, high - low), d, largest, sorted)
    offsets = partition(x.shape[d], x.layout.grid.parts(x.layout.axes(d)))
    count = sum(min(k, b - a) for a, b in pairwise(offsets))
    candidates = x.layout.with_dim(d, count)  # canonical: all ranks give k, or all they have
    values, indices = (fetch_all(x.like(f, candidates), d) for f in (own[0], own[1] + low))
    best, place = func(values, k, d, largest, sorted)
    found = (best, indices.gather(d, place))
    return topk_type([x.like(f, layout) if layout.split_dims else f for f in found])


def _named_dim(args: tuple[Any, ...], kwargs: dict[str, Any], default: int | None) -> int | None:
    return kwargs.get(
        "dim", next((a for a in args if isinstance(a, int) and not isinstance(a, bool)), default)
    )


def _sorted_dim(func: Callable[..., Any], x: Subdomain, dim: int | None) -> int:
    if dim is None:
        raise UnsupportedOperationError(
            f"{name_of(func)} of all elements needs them in order on one rank; name a dim"
        )
    return x.layout.dim(dim)


def _spare_dim(func: Callable[..., Any], x: Subdomain, dim: int) -> int | None:
    """The dim that is to be split in place of `dim`; None if `dim` is whole."""
    if not x.layout.axes(dim):
        return None
    spare = [d for d in range(x.ndim) if x.shape[d] > 1 and not x.layout.axes(d)]
    if not spare:
        raise UnsupportedOperationError(
            f"{name_of(func)} needs all rows of the split dim {dim} in order on one rank, and no "
            "other dim can be split in its place"
        )
    return max(spare, key=lambda d: x.shape[d])


def _count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Count the values of `q` that a quantile takes; None for a single number."""
    q = kwargs.get("q", args[0] if args else None)
    return q.numel() if isinstance(q, Tensor) and q.ndim else None
