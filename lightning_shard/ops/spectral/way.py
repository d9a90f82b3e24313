"""Plans the way from rows to modes and back, as runs of steps between which nothing travels.

A plan follows from the layout and from integers alone, so it is made once for each of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from lightning_shard.domain.layout import Layout, partition
from lightning_shard.ops.spectral.canvas import Positions
from lightning_shard.ops.spectral.cost import Extent, Method, Step, plan
from lightning_shard.ops.spectral.dft import Steps, Transform


@dataclass(frozen=True)
class Question:
    """All that a way depends on.

    Attributes:
        layout: The split of the field, or of the modes.
        dims: The transformed dims; of real data the last one is one-sided.
        extents: The number of points of the transform in each of them.
        kept: Their frequencies.
        factor: Factor of the sums.
        real: True if the field is real.
        real_bytes: Bytes of a real number.
        device: Its type.
        method: The method that is asked for, see `spectral_method`.
    """

    layout: Layout
    dims: tuple[int, ...]
    extents: tuple[int, ...]
    kept: tuple[Positions, ...]
    factor: float
    real: bool
    real_bytes: int
    device: str
    method: Method

    def parts(self, i: int) -> int:
        """Count the ranks over which the i-th of the transformed dims is split."""
        return self.layout.grid.parts(self.layout.axes(self.dims[i]))

    def steps(self, rows: Sequence[int]) -> tuple[Step, ...]:
        """Choose the steps from rows to modes, for a field of so many rows in each dim."""
        points = tuple(
            Extent(n, m, len(kept), self.parts(i))
            for i, (n, m, kept) in enumerate(zip(self.extents, rows, self.kept, strict=True))
        )
        others = prod(
            partition(factor.extent, self.layout.grid.parts(factor.axes))[1]
            for d, dim in enumerate(self.layout.dims)
            if d not in self.dims
            for factor in dim
        )
        return plan(points, others, self.real_bytes, self.real, self.device)


@dataclass(frozen=True)
class Run:
    """Steps that this rank takes one after the other alone.

    Attributes:
        transforms: The dims and their transforms, in the order from rows to modes.
        layout: The split afterwards.
        real: True if the result is a real field.
        crosses: The split dim of which an FFT needs whole rows, if that is the only step.
    """

    transforms: Steps
    layout: Layout
    real: bool = False
    crosses: int | None = None


@dataclass(frozen=True)
class WayBack:
    """The way from modes to rows.

    Attributes:
        whole: The split dims of which products need all modes.
        first: The runs before the last one.
        last: The last run.
    """

    whole: tuple[int, ...]
    first: tuple[Run, ...]
    last: Run


@lru_cache(maxsize=4096)
def to_modes(asked: Question) -> tuple[Run, ...]:
    """Plan the runs from rows to modes; the first has one step, which other reads may share.

    Of whole rows they give all modes, or those of this rank; of a part of the rows partial sums of
    all modes. The last step multiplies by the factor.
    """
    steps = asked.steps([asked.layout.shape[dim] for dim in asked.dims])
    layout, runs = asked.layout, list[Run]()
    for group in (steps[:1], *_alone(asked, steps[1:])):
        transforms: list[tuple[int, Transform]] = []
        for i, fft in group:
            dim, parted = asked.dims[i], asked.parts(i) > 1
            rows = _bounds(layout, dim) if parted and not fft else (0, layout.shape[dim])
            given: Any = {"factor": asked.factor} if (i, fft) == steps[-1] else {}
            transforms.append((dim, Transform(asked.extents[i], rows, asked.kept[i], fft, **given)))
            summed = parted and not fft
            layout = layout.with_dim(dim, len(asked.kept[i]), () if summed else None)
        runs.append(Run(tuple(transforms), layout, crosses=_crossed(asked, group)))
    return tuple(runs)


@lru_cache(maxsize=4096)
def to_rows(asked: Question, *, shared: bool) -> WayBack:
    """Plan the way from modes to rows: of whole modes those of this rank; an FFT takes its own.

    The last of the dims has the factor, and twice that of a frequency that stands for two.

    Args:
        asked: Its layout is that of the modes.
        shared: True if the last step serves other modes, too, and is a run of its own.
    """
    steps = asked.steps(asked.extents)[::-1]
    whole = tuple(asked.dims[i] for i, fft in steps if not fft and asked.parts(i) > 1)
    layout = asked.layout
    for dim in whole:
        layout = layout.with_dim(dim, layout.shape[dim], ())
    apart = [*_alone(asked, steps[:-1]), steps[-1:]] if shared else [*_alone(asked, steps)]
    runs: list[Run] = []
    for group in apart:
        transforms: list[tuple[int, Transform]] = []
        for i, fft in group:
            dim, extent = asked.dims[i], asked.extents[i]
            layout = layout.with_dim(dim, extent, asked.layout.axes(dim))
            crosses = fft and asked.parts(i) > 1
            rows = (0, extent) if crosses else _bounds(layout, dim)
            transform = Transform(extent, rows, asked.kept[i], fft)
            if i == len(asked.dims) - 1:
                transform = replace(transform, factor=asked.factor, one_sided=asked.real)
            transforms.insert(0, (dim, transform))
        runs.append(Run(tuple(transforms), layout, crosses=_crossed(asked, group)))
    return WayBack(whole, tuple(runs[:-1]), replace(runs[-1], real=asked.real))


def _alone(asked: Question, steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Group the steps that follow each other without an exchange between ranks."""
    group: list[Step] = []
    for step in steps:
        if _crossed(asked, [step]) is None:
            group.append(step)
        else:
            yield from [group, [step]] if group else [[step]]
            group = []
    if group:
        yield group


def _crossed(asked: Question, group: Sequence[Step]) -> int | None:
    ((i, fft), *_) = group
    return asked.dims[i] if fft and asked.parts(i) > 1 else None


def _bounds(layout: Layout, dim: int) -> tuple[int, int]:
    return layout.dims[dim][0].bounds(layout.grid)
