"""Shows the overlapping windows of one dim, as `Tensor.unfold` does."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_shard.domain.align import one_factor
from lightning_shard.domain.fetch import fetch, route_of
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.window import window_needs
from lightning_shard.ops.registry import implements


@implements(Tensor.unfold)
def windows(
    func: Callable[..., Any], x: Subdomain, dimension: int, size: int, step: int
) -> Subdomain:
    """Windows of `size` rows, `step` apart: (..., N, ...) -> (..., windows, ..., size).

    Each rank fetches the rows under its windows.
    """
    d = x.layout.dim(dimension)
    if size > x.shape[d] or size < 0 or step <= 0:
        raise RuntimeError(f"unfold of dim {d} with {x.shape[d]} rows: size {size}, step {step}")
    count = (x.shape[d] - size) // step + 1
    local, source, moved = x.local, x, False
    layout = x.layout.with_dim(d, count)
    if x.layout.axes(d):
        x = one_factor(x, d)
        parts = x.layout.grid.parts(x.layout.axes(d))
        needs = window_needs(x.shape[d], parts, count, size, step, 0, 1)
        local, source, moved = fetch(x, d, needs), x, route_of(x, d, needs).moves
    layout = Layout((*layout.dims, (Factor(size),)), layout.grid)
    if layout.local_shape[d] == 0:  # a view, too: a write into it counts as one into its source
        shown = local.narrow(d, 0, 0).unsqueeze(-1).expand(layout.local_shape)
    else:
        shown = local.unfold(d, size, step)
    strides = source.strides_of("unfold", d, size, step)
    return source.copy(shown, layout, strides, moved=moved)
