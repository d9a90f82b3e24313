"""Lazy spectra: a Fourier transform of a split tensor computes only the modes that are read.

`torch.fft.rfftn` of a split tensor returns a `Spectrum` that remembers its source. Shifting and
slicing it are index arithmetic on lists of frequencies. Whatever else touches it computes all of
it. Reading k modes of a split dim multiplies the slab by its columns of the truncated DFT matrix
and reduce-scatters the partial sums over modes, so the bytes sent do not depend on the resolution;
what is hardly truncated is transposed and takes an FFT (ops/spectral/cost.py decides). Modes are
split along the same dims as the field was, so each rank multiplies its own modes by its own slice
of the weights. The inverse transform takes the same steps backwards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lightning_shard.domain.align import one_factor, whole
from lightning_shard.domain.comm import transpose
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch import scatter_sum
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.layout import Layout, part_sizes
from lightning_shard.domain.subdomain import Seen, Subdomain
from lightning_shard.ops.spectral.canvas import Positions, Write
from lightning_shard.ops.spectral.cost import asked_method
from lightning_shard.ops.spectral.dft import Steps, analyse, highest, scale, synthesise
from lightning_shard.ops.spectral.way import Question, Run, to_modes, to_rows
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
        seen: The state of the source when it was transformed.
        begun: The first steps of earlier reads, for reads that share them.
        given: The slices that were read, which are views of it in torch.
    """

    source: Subdomain
    dims: tuple[int, ...]
    extents: tuple[int, ...]
    frequencies: tuple[Positions, ...]
    factor: float
    dtype: torch.dtype
    seen: Seen = field(compare=False, repr=False)
    begun: dict[object, Subdomain] = field(
        default_factory=dict[object, Subdomain], compare=False, repr=False
    )
    given: list[Seen] = field(default_factory=list[Seen], compare=False, repr=False)
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

    @property
    def strides(self) -> tuple[int, ...] | None:
        """The strides that torch's transform has; None where they depend on its library."""
        if not (are_last(self.dims, self.ndim) and self.source.is_in_order):
            return None
        return Layout.of(self.shape, {}, self.layout.grid).strides

    def moved_by(self, order: dict[int, Callable[[Positions], Positions]]) -> "Spectrum":
        """Another order or choice of the frequencies along some of the transformed dims."""
        assert order.keys() <= set(self.dims), "only frequencies have another order"
        frequencies = tuple(
            order[dim](kept) if dim in order else kept
            for dim, kept in zip(self.dims, self.frequencies, strict=True)
        )
        return replace(self, frequencies=frequencies)

    def refuse_stale(self) -> None:
        """Raise where torch would show other values than those that are computed now.

        Raises:
            UnsupportedOperationError: The source was written, or a slice that was read.
        """
        if self.seen.is_stale:
            raise UnsupportedOperationError(
                "a transform is computed where it is read, and its field was written in place "
                "since: torch would show that of the old values. Transform x.clone(), or take "
                "spectrum.clone() before the write"
            )
        if any(slice_.is_stale for slice_ in self.given):
            raise UnsupportedOperationError(
                "a slice of a spectrum is a copy, and was written in place: torch would show the "
                "new values in the spectrum. Assign with spectrum[index] = values, or write into "
                "a clone() of the slice"
            )

    def settled(self) -> Subdomain | None:
        """Compute all modes with the graph that they had; None where slices were read before.

        A tensor that keeps what this returns can be written, and has views.
        """
        if self.given:
            return None
        with torch.inference_mode(self.source.local.is_inference()), torch.enable_grad():
            return self.read()

    def read(self) -> Subdomain:
        """Return the modes, split along the dims along which the source is split."""
        self.refuse_stale()
        x = self.source
        for dim in self.dims:
            x = one_factor(x, dim)
        if not x.dtype.is_complex:
            x = x.like(x.local.to(_computed_in(self.dtype).to_real()))
        asked = _question(x, self.dims, self.extents, self.frequencies, self.factor)
        first, *rest = to_modes(asked)
        key = first, torch.is_grad_enabled(), in_forward_mode()
        if key not in self.begun:
            self.begun[key] = _after(x, first)
        y = self.begun[key]
        for run in rest:
            y = _after(y, run)
        for dim in self.dims:
            if y.layout.axes(dim) != x.layout.axes(dim):  # partial sums
                y = scatter_sum(y, dim, x.layout.axes(dim))
        return Subdomain(y.local.to(self.dtype), y.layout, y.domain, None, self.strides)


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
    sums: dict[Run, Subdomain] = {}
    for write in writes:
        x, kept = _fitting(write, dims, extents, one_sided=real)
        asked = _question(x, tuple(dims), tuple(extents), tuple(kept), factor, real=real)
        way = to_rows(asked, shared=len(writes) > 1)
        for dim in way.whole:
            x = whole(x, dim)
        for run in way.first:
            x = _before(x, run)
        so_far = sums.get(way.last)
        sums[way.last] = x if so_far is None else x.like(x.local + so_far.local)
    total: Subdomain | None = None
    for run, x in sums.items():
        field = _before(x, run)
        total = field if total is None else field.like(total.local + field.local)
    assert total is not None
    shown = writes[0].modes.dtype
    local = total.local.to(shown.to_real() if real else shown)
    if are_last(dims, total.ndim):
        return total.like(local)
    return total.in_any_order(local, total.layout)  # torch's library decides


def are_last(dims: Sequence[int], ndim: int) -> bool:
    """Return True if transformed dims are the last ones of a tensor, in their order."""
    return [*dims] == [*range(ndim - len(dims), ndim)]


def _question(
    x: Subdomain,
    dims: tuple[int, ...],
    extents: tuple[int, ...],
    kept: tuple[Positions, ...],
    factor: float,
    *,
    real: bool | None = None,
) -> Question:
    """Ask for the way of a field; of an inverse `x` are its modes, and `real` is given."""
    return Question(
        x.layout, dims, extents, kept, factor,
        real=not x.dtype.is_complex if real is None else real,
        real_bytes=x.dtype.to_real().itemsize, device=x.local.device.type, method=asked_method(),
    )  # fmt: skip


def _after(x: Subdomain, run: Run) -> Subdomain:
    """Return the modes of rows."""
    return _on_this_rank(x, run, analyse)


def _before(x: Subdomain, run: Run) -> Subdomain:
    """Return the rows of modes."""
    return _on_this_rank(x, run, partial(synthesise, real=run.real))


def _on_this_rank(x: Subdomain, run: Run, function: Callable[[Tensor, Steps], Tensor]) -> Subdomain:
    dim = run.crosses
    if dim is None:
        return x.like(function(x.local, run.transforms), run.layout)
    steps = ((1, run.transforms[0][1]),)
    extent = run.layout.shape[dim]
    return x.like(_on_whole_rows(x, dim, extent, lambda rows: function(rows, steps)), run.layout)


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
    axes = x.layout.axes(dim)
    group, parts = x.domain.group(axes), x.layout.grid.parts(axes)
    moved = x.local.movedim(dim, -1)
    flat = moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
    bands = part_sizes(flat.shape[0], parts)
    rows = transpose(flat, 0, 1, bands, part_sizes(x.shape[dim], parts), group)
    back = transpose(function(rows), 1, 0, part_sizes(extent, parts), bands, group)
    return back.reshape(*moved.shape[:-1], back.shape[1]).movedim(-1, dim)


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
        if highest(positions) >= limit:
            fits = [i for i, p in enumerate(positions) if p < limit]
            x = take_rows(x, dim, torch.tensor(fits, dtype=torch.long, device="cpu"))
            positions = tuple(positions[i] for i in fits)
        kept.append(positions)
    return x, kept


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """complex64 stands in for complex32, of which no transform is accurate."""
    return torch.complex64 if dtype == torch.complex32 else dtype
