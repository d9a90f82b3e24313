"""Lazy spectra: a Fourier transform of a split tensor computes only the modes that are read.

`torch.fft.rfftn` of a split tensor returns a `Spectrum` that remembers its source. Shifting and
slicing it are index arithmetic on lists of frequencies; whatever else touches it reads it. Reading
k modes of a split dim multiplies the slab by its columns of the truncated DFT matrix and
reduce-scatters the partial sums over modes, so the bytes sent do not depend on the resolution.
Modes are split along the same dims as the field was, so each rank multiplies its own modes by its
own slice of the weights.

A plain complex tensor that is assigned such modes (`out = torch.zeros(...); out[slices] = modes`)
becomes a `Canvas` that records the assignment; the inverse transform gathers the recorded modes and
computes the rows of this rank's slab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain import Subdomain
from lightning_shard.halo import scatter_sum
from lightning_shard.layout import Layout
from lightning_shard.ops.align import simple, whole
from lightning_shard.ops.dft import scale, table, to_modes, to_real_rows
from lightning_shard.ops.index import expanded_index
from lightning_shard.ops.registry import UnsupportedOperationError

Positions = tuple[int, ...]


@dataclass(frozen=True)
class Spectrum:
    """The transform of `source` along `dims`, of which nothing is computed yet.

    Attributes:
        source: The field.
        dims: The transformed dims, in the order of torch.fft; of real data the last one is
        one-sided.
        extents: The number of points of the transform in each of `dims`.
        frequencies: For each of `dims` the frequencies in the order in which indices show them.
        sign: -1 for a forward transform, +1 for an inverse one.
        factor: What the sums are multiplied by.
        dtype: The complex dtype that is shown.
    """

    source: Subdomain
    dims: tuple[int, ...]
    extents: tuple[int, ...]
    frequencies: tuple[Positions, ...]
    sign: int
    factor: float
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.source.shape)
        for dim, kept in zip(self.dims, self.frequencies, strict=True):
            shape[dim] = len(kept)
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.source.ndim

    @property
    def local(self) -> Tensor:
        return self.source.local

    @property
    def layout(self) -> Layout:
        return self.source.layout

    def moved_by(self, order: dict[int, Callable[[Positions], Positions]]) -> "Spectrum":
        """Another order or choice of the frequencies along some of the dims."""
        frequencies = tuple(
            order[dim](kept) if dim in order else kept
            for dim, kept in zip(self.dims, self.frequencies, strict=True)
        )
        return replace(self, frequencies=frequencies)

    def read(self) -> Subdomain:
        """The modes, split along the dims along which the source is split."""
        x, partial = self.source, []
        local = x.local if x.local.is_complex() else x.local.to(_real(self.dtype))
        for dim, extent, kept in reversed(
            list(zip(self.dims, self.extents, self.frequencies, strict=True))
        ):
            x = simple(x, dim)
            (rows,) = x.layout.dims[dim]
            matrix = table(extent, kept, rows.bounds(x.layout.grid), self.sign, local.device)
            if dim == self.dims[-1]:
                matrix = matrix * self.factor
            if not local.is_complex():
                local = to_modes(local.movedim(dim, -1), x.ndim - 1, matrix).movedim(-1, dim)
            else:
                local = to_modes(local, dim, matrix)
            partial.append((dim, rows.axes))
            x = x.like(local, x.layout.with_dim(dim, len(kept), axes=()))
        for dim, axes in partial:
            if axes:
                x = scatter_sum(x, dim, axes)
        return x.like(x.local.to(self.dtype))


@dataclass(frozen=True)
class Write:
    """Modes assigned to a canvas: `modes` stand at `positions` of each dim."""

    modes: Subdomain
    positions: tuple[Positions, ...]


@dataclass
class Canvas:
    """A spectrum that is zero but for the recorded assignments.

    A dataclass that is changed in place, because assignment to a tensor is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    writes: list[Write]
    order: tuple[Positions, ...]  # position in the canvas as it was made, for each index shown now

    @staticmethod
    def like(plain: Tensor) -> "Canvas":
        if plain.requires_grad or bool(plain.any()):
            raise UnsupportedOperationError(
                "modes of a split tensor can be assigned to a plain tensor of zeros only"
            )
        shape = tuple(plain.shape)
        return Canvas(shape, plain.dtype, [], tuple(tuple(range(n)) for n in shape))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def local(self) -> Tensor:
        return self.writes[-1].modes.local

    @property
    def layout(self) -> Layout:
        return self.writes[-1].modes.layout

    def assign(self, index: Any, value: Subdomain) -> None:
        entries = expanded_index(len(self.shape), index)
        if any(not isinstance(e, slice) for e in entries):
            raise UnsupportedOperationError("modes are assigned to slices of a spectrum")
        positions = tuple(shown[e] for shown, e in zip(self.order, entries, strict=True))
        if value.shape != tuple(map(len, positions)):
            raise UnsupportedOperationError(
                f"modes of shape {value.shape} assigned to a place of shape "
                f"{tuple(map(len, positions))}"
            )
        for write in self.writes:
            if all(set(a) & set(b) for a, b in zip(write.positions, positions, strict=True)):
                raise UnsupportedOperationError("two assignments of modes to the same place")
        self.writes.append(Write(value.like(value.local.to(self.dtype)), positions))

    def moved_by(self, order: dict[int, Callable[[Positions], Positions]]) -> "Canvas":
        """What is at index i of the result was at index order(i) of this."""
        moved = []
        for d, n in enumerate(self.shape):
            source = order[d](tuple(range(n))) if d in order else tuple(range(n))
            moved.append({old: new for new, old in enumerate(source)})
        writes = [
            Write(
                w.modes,
                tuple(tuple(m[p] for p in at) for m, at in zip(moved, w.positions, strict=True)),
            )
            for w in self.writes
        ]
        return Canvas(self.shape, self.dtype, writes, tuple(tuple(range(n)) for n in self.shape))


def inverse(
    writes: Sequence[Write],
    dims: Sequence[int],
    extents: Sequence[int],
    norm: str | None,
    real: bool,
) -> Subdomain:
    """The field whose spectrum is the sum of `writes`, split as the modes are.

    Args:
        writes: Modes and the positions where they stand.
        dims: The transformed dims; of a real field the last one is one-sided.
        extents: The extents of the field along `dims`; modes that do not fit are dropped, as torch
            does when it trims its input.
        norm: As in torch.fft.
        real: Whether the field is real.
    """
    total: Subdomain | None = None
    for write in writes:
        x = write.modes
        axes = {dim: x.layout.axes(dim) for dim in dims}
        for dim in dims:
            x = whole(x, dim)
        for dim, extent in zip(dims, extents, strict=True):
            one_sided = real and dim == dims[-1]
            x = _rows_of_modes(x, dim, extent, write.positions[dim], axes[dim], one_sided)
        x = x.like(x.local * scale(norm, extents, +1))
        total = x if total is None else x.like(total.local + x.local)
    assert total is not None
    return total


def _rows_of_modes(
    x: Subdomain,
    dim: int,
    extent: int,
    positions: Positions,
    axes: tuple[int, ...],
    one_sided: bool,
) -> Subdomain:
    """Sum the modes of whole `dim` into this rank's rows of a field split over `axes`."""
    limit = extent // 2 + 1 if one_sided else extent
    fits = [i for i, p in enumerate(positions) if p < limit]
    local = x.local
    if len(fits) < len(positions):
        local = local.index_select(dim, torch.tensor(fits, device=local.device))
    kept = tuple(positions[i] for i in fits)
    layout = x.layout.with_dim(dim, extent, axes)
    rows = layout.dims[dim][0].bounds(layout.grid)
    matrix = table(extent, kept, rows, +1, local.device)
    if not one_sided:
        return x.like(to_modes(local, dim, matrix.t()), layout)
    twice = [1.0 if p == 0 or 2 * p == extent else 2.0 for p in kept]
    weights = torch.tensor(twice, dtype=torch.float64, device=local.device)
    local = to_real_rows(local.movedim(dim, -1), matrix * weights[:, None]).movedim(-1, dim)
    return x.like(local, layout)


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.complex128 else torch.float32
