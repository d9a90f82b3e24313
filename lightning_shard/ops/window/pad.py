"""Padding and cropping: whole dims are done locally, split ones row by row of the output."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F

from lightning_shard.domain.align import in_own_memory, one_factor
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.fetch import Span, fetch, needs_of
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.window import with_edges
from lightning_shard.ops.autocast import cast_for, of_one
from lightning_shard.ops.registry import implements
from lightning_shard.ops.view.index import chosen_rows, strided


@implements(F.pad, joins=True)
def pad(
    func: Callable[..., Any],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Subdomain:
    """Whole dims are padded locally, split ones row by row of the padded output."""
    pad, inner = [int(n) for n in pad], [0] * len(pad)
    (x,) = cast_for(of_one(F.pad, tuple(inner), mode), input)
    for i in range(len(pad) // 2):
        dim, before, after = x.ndim - 1 - i, pad[2 * i], pad[2 * i + 1]
        if not x.layout.axes(dim):
            inner[2 * i : 2 * i + 2] = before, after
        elif before or after:
            x = _pad_split(x, dim, before, after, mode, value)
    if mode == "circular":  # torch's result lies row by row
        x = x.in_rows(x.local.contiguous())
    if not any(inner):
        return in_own_memory(x, input)
    layout = x.layout
    for i in range(len(pad) // 2):
        if any(inner[2 * i : 2 * i + 2]):
            dim = x.ndim - 1 - i
            layout = layout.with_dim(dim, x.shape[dim] + sum(inner[2 * i : 2 * i + 2]))
    if mode != "constant" and 0 in layout.local_shape:  # torch refuses to mirror no rows
        is_curved = mode != "circular"  # torch copies those rows
        attached = empty_attached(layout.local_shape, x.local, is_curved=is_curved)
        return x.like(attached, layout)
    return x.like(F.pad(x.local, inner, mode, value), layout)


def _pad_split(
    x: Subdomain, dim: int, before: int, after: int, mode: str, value: float | None
) -> Subdomain:
    if mode == "circular" and min(before, after) < 0:  # torch crops first, then wraps the rest
        x = strided(x, dim, range(max(-before, 0), x.shape[dim] - max(-after, 0)))
        before, after = max(before, 0), max(after, 0)
    n = x.shape[dim]
    extent = n + before + after
    if mode != "constant":
        limit = {"reflect": n - 1, "circular": n, "replicate": max(before, after)}[mode]
        if max(before, after) > limit:
            raise RuntimeError(f"{mode} padding ({before}, {after}) is too large for size {n}")
        period = max(2 * (n - 1), 1)
        source: dict[str, Callable[[int], int]] = {
            "reflect": lambda o: n - 1 - abs(n - 1 - (o - before) % period),
            "replicate": lambda o: min(max(o - before, 0), n - 1),
            "circular": lambda o: (o - before) % n,
        }
        return chosen_rows(x, dim, extent, source[mode])
    x = one_factor(x, dim)
    layout = x.layout.with_dim(dim, extent)
    low, high = layout.dims[dim][0].bounds(layout.grid)

    def inside(low: int, high: int) -> list[Span]:
        first, last = max(low - before, 0), min(high - before, n)
        return [(first, last)] if first < last else []

    rows = fetch(x, dim, needs_of(extent, layout.grid.parts(layout.axes(dim)), inside))
    missing = high - low - rows.shape[dim]
    head = min(max(before - low, 0), missing)
    return x.like(with_edges(x, dim, rows, head, missing - head, value), layout)
