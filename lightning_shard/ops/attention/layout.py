"""Computes the layouts in which operands attend, and what it costs to bring them there.

B batch, H heads, L queries, S keys, E features: queries (B, H, L, E), keys and values (B, H, S, E),
mask (B, H, L, S); more or fewer batch dims are as good.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from lightning_shard.domain.align import (
    broadcasting,
    common_dim,
    common_layout,
    local_part,
    split_moved,
    subdomains,
    whole,
)
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Dim, Factor, Layout, layout_of
from lightning_shard.domain.subdomain import Subdomain

Operand = Subdomain | Tensor
TOGETHER = 2**22  # bytes of a rank's part: larger ones take longer to be copied than a message does


@dataclass(frozen=True)
class Operands:
    """Holds what attends to what.

    If `grouped`, query heads share one head of keys and values. If `causal`, a query attends to
    keys up to its own place.
    """

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None
    grouped: bool
    causal: bool = False

    @cached_property
    def owner(self) -> Subdomain:
        """The first split operand; the others are on its mesh."""
        return next(x for x in self._each() if isinstance(x, Subdomain))

    def described(self) -> tuple[object, ...]:
        """Return what decides how they attend: it is equal for operands that are alike."""
        return (
            *[(x.layout if isinstance(x, Subdomain) else tuple(x.shape), x.dtype)
              for x in self._each()],
            self.grouped, self.causal,
        )  # fmt: skip

    def split_features(self) -> str:
        """Name the first operand whose features are split, in words; "" if there is none."""
        for name, x in (("query", self.query), ("key", self.key), ("value", self.value)):
            if isinstance(x, Subdomain) and x.layout.axes(x.ndim - 1):
                return f"the features of {name} are split ({x.layout})"
        return ""

    def output(self) -> Layout:
        """Batches, heads and queries split as in any of the operands, the features whole."""
        split = subdomains(self._each())
        if self.grouped and any(x.layout.axes(x.ndim - 3) for x in split if x.ndim > 2):
            raise UnsupportedOperationError("enable_gqa with split heads")
        ones = 3 if self.grouped else 2
        stand_ins = [_broadcast(x, ones, rows=x is self.query) for x in self._each()[:3]]
        if self.mask is not None:
            stand_ins.append(_broadcast(self.mask, ones, rows=True))
        layout = common_layout(stand_ins)
        if self.grouped:
            layout = with_last(layout, 3, self.query.shape[-3])
        return with_last(layout, 1, self.value.shape[-1])

    def shares(self, output: Layout) -> list[tuple[Operand, Layout]]:
        """Return each operand with the layout of what an output of this layout needs of it."""
        heads = self.key.shape[-3] if self.grouped else None
        *_, count, features = self.key.shape
        layouts = _needed(output, self.query.shape[-1], (count, features), heads)
        return list(zip(self._each(), layouts, strict=False))

    def sequence_axes(self) -> tuple[int, ...]:
        """Return the axes that split queries and keys along the sequence; none if they differ."""
        return _axes_of_rows(self.query, self.key, self.value)

    def key_axes(self) -> tuple[int, ...]:
        """Return the axes that split keys and values along the sequence; none if they differ."""
        return _axes_of_rows(self.key, self.value)

    def keys(self) -> Dim:
        """Return the split of keys and values along the sequence."""
        split = [x for x in subdomains([self.key, self.value]) if x.layout.axes(x.ndim - 2)]
        dim = common_dim(split[0].layout.dims[-2], split[-1].layout.dims[-2])
        assert dim is not None  # they have the same axes
        return dim

    def by_heads(self, output: Layout) -> Layout | None:
        """Return the output with whole rows, and the heads (or a batch dim) split in their place.

        Of the dims that are whole the one that keeps the ranks busiest. None if there is none.
        """
        axes, rows = self.sequence_axes(), output.ndim - 2
        ranks = output.grid.parts(axes)
        dims = [d for d in range(rows) if not output.axes(d)]
        if self.grouped and any(x.shape[-3] % ranks for x in self._each()[:3]):
            dims = [d for d in dims if d != rows - 1]
        if not dims or not axes:
            return None
        best = max(dims, key=lambda d: (balance(output.shape[d], ranks), d))
        inner = output.with_dim(rows, output.shape[rows], ())
        return inner.with_dim(best, output.shape[best], axes)

    def sent(self, output: Layout, inner: Layout) -> float:
        """About how many elements a rank sends to compute in layout `inner`, and to return."""
        total = sum(_sent(x, wanted) for x, wanted in self.shares(inner))
        for d in set(inner.split_dims) - set(output.split_dims):
            ranks = inner.grid.parts(inner.axes(d))
            part = math.prod(inner.shape) / inner.grid.parts(inner.axes()) * (ranks - 1)
            total += part / ranks if output.axes(output.ndim - 2) else part
        return total

    def key_bytes(self) -> int:
        """Count the bytes of the keys and values of all ranks for one rank's batches and heads."""
        axes, total = self.key_axes(), 0
        for x in (self.key, self.value):
            parts = 1
            if isinstance(x, Subdomain):
                parts = x.layout.grid.parts(tuple(a for a in x.layout.axes() if a not in axes))
            total += math.prod(x.shape) * x.dtype.itemsize // parts
        return total

    def _each(self) -> list[Operand]:
        found = [self.query, self.key, self.value]
        return found if self.mask is None else [*found, self.mask]


def balance(extent: int, ranks: int) -> float:
    """Divide the mean number of rows of a rank by the greatest."""
    return extent / (ranks * max(-(-extent // ranks), 1))


def with_last(layout: Layout, back: int, extent: int) -> Layout:
    """Return the layout with the dim `back` from the end whole and of another extent."""
    return layout.with_dim(layout.ndim - back, extent, ())


@lru_cache(maxsize=4096)
def _needed(
    output: Layout, of_query: int, of_key: tuple[int, int], heads: int | None
) -> tuple[Layout, ...]:
    """The layouts of what an output needs of query, key, value and mask.

    Args:
        output: The layout of the output.
        of_query: The number of a query's features.
        of_key: The number of keys, and of a key's features.
        heads: The number of a key's heads, where a group of query heads shares one.
    """
    keys = with_last(output, 2, of_key[0])
    if heads is not None:
        keys = keys.with_dim(keys.ndim - 3, heads)
    of_mask = with_last(output, 1, of_key[0])
    return with_last(output, 1, of_query), with_last(keys, 1, of_key[1]), keys, of_mask


def bring(x: Operand, wanted: Layout) -> Tensor:
    """Bring this rank's part of `x` in an operation of layout `wanted`."""
    for d, instead in _moves(x, wanted):
        assert isinstance(x, Subdomain)
        x = whole(x, d) if instead is None else split_moved(x, d, instead)
    return local_part(x, wanted)


def bring_all(shares: Sequence[tuple[Operand, Layout]]) -> list[Tensor]:
    """Bring this rank's part of each operand; small ones that travel alike do so together."""
    found: list[Tensor] = []
    for (kind, *_), group in itertools.groupby(shares, _travel):
        operands, layouts = zip(*group, strict=True)
        if kind is None or len(operands) == 1:
            found += map(bring, operands, layouts)
            continue
        first, wanted = operands[0], layouts[0]
        layout = _with_first(first.layout, len(operands))
        together = first.like(torch.stack([x.local for x in operands]), layout)
        found += bring(together, _with_first(wanted, len(operands))).unbind()
    return found


def _travel(share: tuple[Operand, Layout]) -> tuple[object, ...]:
    """Return the key by which operands share one message; (None,) for one that is sent alone."""
    x, wanted = share
    if not isinstance(x, Subdomain) or not _moves(x, wanted):
        return (None,)
    size = math.prod(x.shape) * x.dtype.itemsize // x.layout.grid.parts(x.layout.axes())
    return (x.layout, x.dtype, wanted) if size <= TOGETHER else (None,)


def _with_first(layout: Layout, extent: int) -> Layout:
    """The layout of that many tensors, stacked."""
    return layout_of(((Factor(extent),), *layout.dims), layout.grid)


def _sent(x: Operand, wanted: Layout) -> float:
    """The elements that a rank sends to `bring` it, about."""
    sent = 0.0
    for d, instead in _moves(x, wanted):
        assert isinstance(x, Subdomain)
        ranks = x.layout.grid.parts(x.layout.axes(d))
        part = math.prod(x.shape) / x.layout.grid.parts(x.layout.axes()) * (ranks - 1)
        sent += part if instead is None else part / ranks
    return sent


def _moves(x: Operand, wanted: Layout) -> list[tuple[int, int | None]]:
    """The split dims of `x` that are whole in `wanted`, each with the dim that is split instead."""
    return _moves_of(x.layout, wanted) if isinstance(x, Subdomain) else []


@lru_cache(maxsize=4096)
def _moves_of(layout: Layout, wanted: Layout) -> list[tuple[int, int | None]]:
    first = wanted.ndim - layout.ndim
    found: list[tuple[int, int | None]] = []
    for d in layout.split_dims:
        if not wanted.axes(first + d):
            axes = layout.axes(d)
            others = [
                t for t, n in enumerate(layout.shape) if n > 1 and wanted.axes(first + t) == axes
            ]
            found.append((d, others[0] if others else None))
    return found


def _axes_of_rows(*operands: Operand) -> tuple[int, ...]:
    split = {x.layout.axes(x.ndim - 2) for x in operands if isinstance(x, Subdomain)} - {()}
    return split.pop() if len(split) == 1 else ()


def _broadcast(x: Operand, ones: int, *, rows: bool) -> Operand:
    """An operand like `x` whose last `ones` dims broadcast, except the rows if they are to stay."""
    gone = {x.ndim - 1 - i for i in range(min(ones, x.ndim)) if not (rows and i == 1)}
    return broadcasting(x, gone)
