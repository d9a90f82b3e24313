"""Lazy spectra: a Fourier transform of a split tensor computes only the modes that are read.

`torch.fft.rfftn` of a split tensor returns a `Spectrum` that remembers its source. Shifting and
slicing it are index arithmetic on lists of frequencies; whatever else touches it reads it. Reading
k modes of a split dim multiplies the slab by its columns of the truncated DFT matrix and
reduce-scatters the partial sums over modes, so the bytes sent do not depend on the resolution; what
is hardly truncated is transposed and takes an FFT (ops/spectral/cost.py decides). Modes are split
along the same dims as the field was, so each rank multiplies its own modes by its own slice of the
weights. The inverse transform takes the same steps backwards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from lightning_shard.domain.align import one_factor, whole
from lightning_shard.domain.cache import made_once
from lightning_shard.domain.comm import transpose
from lightning_shard.domain.fetch import scatter_sum
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.layout import Layout, part_sizes, partition
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.spectral.canvas import Positions, Write
from lightning_shard.ops.spectral.cost import Extent, Step, plan
from lightning_shard.ops.spectral.dft import Transform, analyse, scale, synthesise
from lightning_shard.ops.view.index import take_rows


@dataclass(frozen=True)
class Spectrum:
    """The transform of `source` along `dims`, of which nothing is computed yet.

    Attributes:
        source: The field.
        dims: The transformed dims, in the order of torch.fft; of real data the last one is
            one-sided.
        extents: The number of points of the transform in each of `dims`.
        frequencies: Frequencies of each of `dims`, in the order in which indices show them.
        factor: Factor of the sums.
        dtype: The complex dtype that is shown.
        begun: The first steps of earlier reads, for reads that share them.
    """

    source: Subdomain
    dims: tuple[int, ...]
    extents: tuple[int, ...]
    frequencies: tuple[Positions, ...]
    factor: float
    dtype: torch.dtype
    begun: dict[object, Subdomain] = field(
        default_factory=dict[object, Subdomain], compare=False, repr=False
    )
    lazy: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, with the kept frequencies in the transformed dims."""
        shape = list(self.source.shape)
        for dim, kept in zip(self.dims, self.frequencies, strict=True):
            shape[dim] = len(kept)
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.source.ndim

    @property
    def local(self) -> Tensor:
        """This rank's part of the field that is transformed."""
        return self.source.local

    @property
    def layout(self) -> Layout:
        """The split of the field that is transformed."""
        return self.source.layout

    def moved_by(self, order: dict[int, Callable[[Positions], Positions]]) -> "Spectrum":
        """Another order or choice of the frequencies along some of the transformed dims."""
        assert order.keys() <= set(self.dims), "only frequencies have another order"
        frequencies = tuple(
            order[dim](kept) if dim in order else kept
            for dim, kept in zip(self.dims, self.frequencies, strict=True)
        )
        return replace(self, frequencies=frequencies)

    def read(self) -> Subdomain:
        """Return the modes, split along the dims along which the source is split."""
        x = self.source
        for dim in self.dims:
            x = one_factor(x, dim)
        if not x.dtype.is_complex:
            x = x.like(x.local.to(_computed_in(self.dtype).to_real()))
        layout = x.layout
        (first, *rest) = _steps(x, self.dims, self.extents, self.frequencies)
        key = first, self.frequencies[first[0]], torch.is_grad_enabled(), in_forward_mode()
        if key not in self.begun:
            self.begun[key] = self._step(x, first)
        x = self.begun[key]
        for step in rest:
            x = self._step(x, step)
        for dim in self.dims:
            if x.layout.axes(dim) != layout.axes(dim):  # partial sums
                x = scatter_sum(x, dim, layout.axes(dim))
        local = x.local if self.factor == 1 else x.local * self.factor
        return x.like(local.to(self.dtype))

    def _step(self, x: Subdomain, step: Step) -> Subdomain:
        """Rows of one dim to modes: of whole rows all, or this rank's modes; else partial sums."""
        i, fft = step
        dim, kept = self.dims[i], self.frequencies[i]
        axes, rows = x.layout.axes(dim), x.shape[dim]
        if _parts(x, dim) == 1:
            transform = Transform(self.extents[i], (0, rows), kept, fft)
            return x.like(analyse(x.local, dim, transform), x.layout.with_dim(dim, len(kept)))
        if fft:
            transform = Transform(self.extents[i], (0, rows), kept, fft)
            local = _on_whole_rows(x, dim, len(kept), lambda x: analyse(x, 1, transform))
            return x.like(local, x.layout.with_dim(dim, len(kept), axes))
        bounds = x.layout.dims[dim][0].bounds(x.layout.grid)
        local = analyse(x.local, dim, Transform(self.extents[i], bounds, kept))
        return x.like(local, x.layout.with_dim(dim, len(kept), axes=()))


def inverse(
    writes: Sequence[Write],
    dims: Sequence[int],
    extents: Sequence[int],
    norm: str | None,
    real: bool,
) -> Subdomain:
    """Make the field whose spectrum is the sum of `writes`, split as the modes are.

    Args:
        writes: Modes and the positions where they stand.
        dims: The transformed dims; of a real field the last one is one-sided.
        extents: The extents of the field along `dims`; modes that do not fit are dropped, as torch
            does when it trims its input.
        norm: The normalization, by torch.fft's names.
        real: True if the field is real.
    """
    factor = scale(norm, extents, forward=False)
    sums: dict[tuple[Step, Positions], tuple[Subdomain, tuple[int, ...]]] = {}
    for write in writes:
        x, kept = _fitting(write, dims, extents, one_sided=real)
        x = _weighted(x, dims[-1], kept[-1], extents[-1], factor) if real else x
        x = x if real or factor == 1 else x.like(x.local * factor)
        axes = {dim: x.layout.axes(dim) for dim in dims}
        *steps, last = reversed(_steps(x, dims, extents, kept, real=real))
        for i, fft in (*steps, last):
            x = whole(x, dims[i]) if not fft and _parts(x, dims[i]) > 1 else x
        for step in steps:
            dim = dims[step[0]]
            x = _step_back(x, dim, extents[step[0]], kept[step[0]], step[1], axes[dim], real=False)
        key = last, kept[last[0]]
        so_far = sums.get(key)
        if so_far is not None:
            x = x.like(x.local + so_far[0].local)
        sums[key] = x, axes[dims[last[0]]]
    total: Subdomain | None = None
    for ((i, fft), kept_last), (x, axes_last) in sums.items():
        x = _step_back(x, dims[i], extents[i], kept_last, fft, axes_last, real=real)
        total = x if total is None else x.like(total.local + x.local)
    assert total is not None
    shown = writes[0].modes.dtype
    return total.like(total.local.to(shown.to_real() if real else shown))


def _step_back(
    x: Subdomain,
    dim: int,
    extent: int,
    kept: Positions,
    fft: bool,
    axes: tuple[int, ...],
    *,
    real: bool,
) -> Subdomain:
    """Modes of one dim to rows: of whole modes this rank's rows; an FFT takes its own modes."""
    layout = x.layout.with_dim(dim, extent, axes)
    if fft and _parts(x, dim) > 1:
        transform = Transform(extent, (0, extent), kept, fft)
        back = _on_whole_rows(x, dim, extent, lambda x: synthesise(x, 1, transform, real=real))
        return x.like(back, layout)
    rows = layout.dims[dim][0].bounds(layout.grid)
    transform = Transform(extent, rows, kept, fft)
    return x.like(synthesise(x.local, dim, transform, real=real), layout)


def _on_whole_rows(
    x: Subdomain, dim: int, extent: int, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply `function` to whole rows of split `dim`: all other dims are split for it, and back.

    Args:
        x: The split tensor.
        dim: The split dim.
        extent: Extent of the result in `dim`.
        function: (m, N) -> (m, extent).
    """
    group, parts = x.domain.group(x.layout.axes(dim)), _parts(x, dim)
    moved = x.local.movedim(dim, -1)
    flat = moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
    bands = part_sizes(flat.shape[0], parts)
    rows = transpose(flat, 0, 1, bands, part_sizes(x.shape[dim], parts), group)
    back = transpose(function(rows), 1, 0, part_sizes(extent, parts), bands, group)
    return back.reshape(*moved.shape[:-1], back.shape[1]).movedim(-1, dim)


def _steps(
    x: Subdomain,
    dims: Sequence[int],
    extents: Sequence[int],
    kept: Sequence[Positions],
    *,
    real: bool | None = None,
) -> tuple[Step, ...]:
    """The plan for a field; of an inverse `x` are its modes."""
    known = real is not None
    points = tuple(
        Extent(n, n if known else x.shape[d], len(k), _parts(x, d))
        for d, n, k in zip(dims, extents, kept, strict=True)
    )
    others = math.prod(
        partition(f.extent, x.layout.grid.parts(f.axes))[1]
        for d, dim in enumerate(x.layout.dims)
        if d not in dims
        for f in dim
    )
    real = real if real is not None else not x.dtype.is_complex
    return plan(points, others, x.dtype.to_real().itemsize, real, x.local.device.type)


def _fitting(
    write: Write, dims: Sequence[int], extents: Sequence[int], *, one_sided: bool
) -> tuple[Subdomain, list[Positions]]:
    """The modes that a field of `extents` has, in the dtype to compute in, and their positions."""
    x = write.modes
    x = x.like(x.local.to(_computed_in(x.dtype)))
    kept: list[Positions] = []
    for dim, extent in zip(dims, extents, strict=True):
        x = one_factor(x, dim)
        positions = write.positions[dim]
        limit = extent // 2 + 1 if one_sided and dim == dims[-1] else extent
        fits = [i for i, p in enumerate(positions) if p < limit]
        if len(fits) < len(positions):
            x = take_rows(x, dim, torch.tensor(fits, dtype=torch.long))
        kept.append(tuple(positions[i] for i in fits))
    return x, kept


def _weighted(x: Subdomain, dim: int, kept: Positions, extent: int, factor: float) -> Subdomain:
    """Modes of one-sided `dim` times what their negatives add to a real field."""
    low, high = x.layout.dims[dim][0].bounds(x.layout.grid)
    weights = _twice(kept[low:high], extent, factor, x.dtype.to_real(), x.local.device)
    return x.like(x.local * weights.view(-1, *[1] * (x.ndim - dim - 1)))


@made_once
def _twice(
    kept: Positions, extent: int, factor: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    weights = [factor if p == 0 or 2 * p == extent else 2 * factor for p in kept]
    return torch.tensor(weights, dtype=torch.float64, device=device).to(dtype)


def _parts(x: Subdomain, dim: int) -> int:
    return x.layout.grid.parts(x.layout.axes(dim))


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """complex64 stands in for complex32, of which no transform is accurate."""
    return torch.complex64 if dtype == torch.complex32 else dtype
