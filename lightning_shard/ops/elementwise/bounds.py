"""Finds the place of each value among sorted bounds, which are few: every rank has all of a row."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import gathered, local_part, subdomains, whole
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements

Operand = Subdomain | Tensor


@implements(torch.bucketize, torch.isin)
def look_up(func: Callable[..., Tensor], x: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
    """Each element is looked up in a table, of which each rank gets all."""
    table = gathered(table).detach() if isinstance(table, Subdomain) else table
    if isinstance(x, Subdomain):
        return x.like(func(x.local.contiguous(), table, *args, **kwargs))
    return func(x, table, *args, **kwargs)


@implements(torch.searchsorted)
def searchsorted(
    func: Callable[..., Tensor],
    bounds: Operand,
    values: Any,
    *,
    sorter: Operand | None = None,
    **kwargs: Any,
) -> Any:
    """Values (*rows, N) are looked up in bounds (M), or in those of their own row (*rows, M)."""
    owner = subdomains([bounds, values, sorter])[0]
    if bounds.ndim == 1 or not isinstance(values, Subdomain | Tensor):
        row, order = (gathered(t) if isinstance(t, Subdomain) else t for t in (bounds, sorter))
        return look_up(lambda x, t: func(t, x, sorter=order, **kwargs), values, row)
    layout = Layout.of(values.shape, {}, owner.layout.grid)
    for o in subdomains([values, bounds]):
        for d in o.layout.split_dims:
            free = not set(layout.axes()) & set(o.layout.axes(d)) and not layout.axes(d)
            if free and (o is values or d < o.ndim - 1):
                layout = layout.with_dims({d: o.layout.dims[d]})
    rows = Layout((*layout.dims[:-1], (Factor(bounds.shape[-1]),)), layout.grid)
    own = [None if t is None else _brought(t, rows) for t in (bounds, sorter)]
    found = func(own[0], _brought(values, layout), sorter=own[1], **kwargs)
    return owner.like(found, layout) if layout.split_dims else found


def _brought(x: Operand, layout: Layout) -> Tensor:
    """This rank's part of a tensor that may be split where the layout is whole."""
    for d in x.layout.split_dims if isinstance(x, Subdomain) else ():
        assert isinstance(x, Subdomain)
        if layout.axes(d) != x.layout.axes(d):
            x = whole(x, d)
    return local_part(x, layout).contiguous()
