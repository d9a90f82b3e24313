"""Says which rank owns which rows of a split tensor: in integers only, without communication.

A dim of extent N split over P ranks has one canonical partition, a pure function of (N, P): the
balanced one of `torch.tensor_split`. So no rank ever asks another for sizes, and every output of
every operation is split canonically for its own extent.

A dim is a product of *factors*: `flatten` of (C, H, W) with split H is one dim of three factors
whose local part is (C, h, W) flattened. That makes a reshape an exchange of factors, without moving
data.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from lightning_shard.processes.arguments import is_whole


@lru_cache(maxsize=4096)
def partition(extent: int, parts: int) -> tuple[int, ...]:
    """Offsets of the canonical partition: part `i` holds rows `[offsets[i], offsets[i + 1])`."""
    size, larger = divmod(extent, parts)
    return (0, *accumulate(size + (i < larger) for i in range(parts)))


def part_sizes(extent: int, parts: int) -> list[int]:
    """Count the rows of each part of the canonical partition."""
    return [high - low for low, high in pairwise(partition(extent, parts))]


@dataclass(frozen=True)
class Grid:
    """The ranks of a domain mesh as integers: the size of each mesh axis and this rank's place."""

    sizes: tuple[int, ...]
    coord: tuple[int, ...]

    def parts(self, axes: tuple[int, ...]) -> int:
        """Count the parts into which `axes` together split a dim."""
        return self.sizes[axes[0]] if len(axes) == 1 else math.prod([self.sizes[a] for a in axes])

    def index(self, axes: tuple[int, ...]) -> int:
        """Return this rank's place along `axes` taken together, the last of them fastest."""
        index = 0
        for a in axes:
            index = index * self.sizes[a] + self.coord[a]
        return index


class Factor(NamedTuple):
    """A factor of a tensor dim: its global extent, and the mesh axes that split it, if any.

    A tuple, since layouts are compared and looked up in every call.
    """

    extent: int
    axes: tuple[int, ...] = ()

    def bounds(self, grid: Grid) -> tuple[int, int]:
        """Return the global rows `[low, high)` of this rank."""
        return _bounds(self, grid)

    def rows(self, grid: Grid) -> int:
        """Count the rows that this rank has."""
        if not self.axes:
            return self.extent
        low, high = self.bounds(grid)
        return high - low


Dim = tuple[Factor, ...]


@lru_cache(maxsize=4096)
def _bounds(factor: Factor, grid: Grid) -> tuple[int, int]:
    offsets = partition(factor.extent, grid.parts(factor.axes))
    index = grid.index(factor.axes)
    return offsets[index], offsets[index + 1]


def _extent(dim: Dim) -> int:
    return dim[0].extent if len(dim) == 1 else math.prod([f.extent for f in dim])


@dataclass(frozen=True, eq=False)
class Layout:
    """The split of a tensor over a grid: the factors of each dim of the global tensor."""

    dims: tuple[Dim, ...]
    grid: Grid

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self.dims == other.dims and self.grid == other.grid

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.grid))

    @staticmethod
    def of(shape: Sequence[int], splits: dict[int, tuple[int, ...]], grid: Grid) -> "Layout":
        """Make the layout of a tensor of `shape` whose dim `d` is split over axes `splits[d]`."""
        dims = tuple((Factor(int(n), splits.get(d, ())),) for d, n in enumerate(shape))
        return layout_of(dims, grid)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple([_extent(dim) for dim in self.dims])

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides of the whole tensor where it lies row by row."""
        steps = accumulate([max(n, 1) for n in reversed(self.shape[1:])], operator.mul, initial=1)
        return tuple(steps)[::-1] if self.dims else ()

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return tuple([math.prod([f.rows(self.grid) for f in dim]) for dim in self.dims])

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.dims)

    @cached_property
    def split_dims(self) -> tuple[int, ...]:
        """The dims of which at least one factor is split."""
        return tuple([d for d, dim in enumerate(self.dims) if any(f.axes for f in dim)])

    @cached_property
    def leaves_empty(self) -> bool:
        """True if some rank has no elements for want of rows."""
        return any(f.extent < self.grid.parts(f.axes) for dim in self.dims for f in dim if f.axes)

    @cached_property
    def leaves_one_row(self) -> bool:
        """True if some rank has at most one of several rows."""
        split = [f for dim in self.dims for f in dim if f.axes]
        return any(1 < f.extent < 2 * self.grid.parts(f.axes) for f in split)

    def axes(self, *dims: int) -> tuple[int, ...]:
        """Return the mesh axes over which `dims` are split (all dims if none is named)."""
        if len(dims) == 1:
            return self._axes[dims[0]]
        if not dims:
            return self._all_axes
        found = self._axes_of_several.get(dims)
        if found is None:
            found = tuple(sorted([a for d in dims for a in self._axes[d]]))
            self._axes_of_several[dims] = found
        return found

    def parts(self, *dims: int) -> int:
        """Count the ranks over which `dims` are split (all dims if none is named)."""
        return self._parts[dims[0]] if len(dims) == 1 else self.grid.parts(self.axes(*dims))

    @cached_property
    def _parts(self) -> tuple[int, ...]:
        return tuple([self.grid.parts(axes) for axes in self._axes])

    @cached_property
    def _all_axes(self) -> tuple[int, ...]:
        return tuple(sorted([a for axes in self._axes for a in axes]))

    @cached_property
    def _axes_of_several(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}

    @cached_property
    def _axes(self) -> tuple[tuple[int, ...], ...]:
        return tuple([tuple(sorted([a for f in dim for a in f.axes])) for dim in self.dims])

    def dim(self, dim: int) -> int:
        """`dim` counted from the front; raises IndexError as torch does."""
        ndim = len(self.dims) or 1  # as in torch, a tensor without dims takes 0 and -1
        if not -ndim <= dim < ndim:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-ndim}, "
                f"{ndim - 1}], but got {dim})"
            )
        return dim % ndim

    def with_dim(self, dim: int, extent: int, axes: tuple[int, ...] | None = None) -> "Layout":
        """Return the layout with `dim` of another extent (and split over other axes, if given)."""
        return _with_dim(self, dim, extent, axes)

    def with_dims(self, changed: dict[int, Dim]) -> "Layout":
        """Return this layout with other factors for the dims in `changed`."""
        dims = tuple([changed.get(d, dim) for d, dim in enumerate(self.dims)])
        return layout_of(dims, self.grid)

    def __str__(self) -> str:
        parts: list[str] = []
        for d in self.split_dims:
            sizes = "x".join(str(self.grid.sizes[a]) for a in self.axes(d))
            parts.append(f"dim {d} split over {sizes} ranks")
        return f"shape {self.shape}, " + (", ".join(parts) or "whole on every rank")


@lru_cache(maxsize=4096)
def layout_of(dims: tuple[Dim, ...], grid: Grid) -> Layout:
    """Return one object for equal layouts, which knows its shape and its hash from the first time.

    So it is quicker than a new `Layout` where an operation of each step asks for it.
    """
    return Layout(dims, grid)


@lru_cache(maxsize=4096)
def _with_dim(layout: Layout, dim: int, extent: int, axes: tuple[int, ...] | None) -> Layout:
    axes = layout.axes(dim) if axes is None else axes
    return layout.with_dims({dim: (Factor(extent, axes),)})


def merge(dim: Sequence[Factor]) -> Dim:
    """Return the shortest equal dim: neighbouring whole factors are one, those of extent 1 go."""
    merged: list[Factor] = []
    for factor in dim:
        if factor.extent == 1 and not factor.axes:
            continue
        if merged and not factor.axes and not merged[-1].axes:
            merged[-1] = Factor(merged[-1].extent * factor.extent)
        else:
            merged.append(factor)
    return tuple(merged) or (Factor(1),)


def listed_dims(dims: int | Sequence[int], name: str = "dims") -> tuple[int, ...]:
    """Return tensor dims as a tuple.

    Raises:
        ValueError: They are no whole numbers; the message calls them by `name`.
    """
    given: Any = dims
    is_many = isinstance(dims, Sequence) and not isinstance(dims, str | bytes)
    chosen: tuple[Any, ...] = tuple(given) if is_many else (given,)
    if not all(is_whole(d, least=None) for d in chosen):
        raise ValueError(
            f"{name} must be the number of a tensor dim, or a list with one for each mesh axis, "
            f"such as 2 or (2, 3); got {dims!r}."
        )
    return tuple(map(int, chosen))


def splits_of(
    ndim: int, sizes: Sequence[int], dims: int | Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Find the mesh axes that split each tensor dim, from the dim that each mesh axis splits.

    All axes may split one dim, such as the nodes of a graph.
    """
    chosen = [*listed_dims(dims)]
    if len(chosen) != len(sizes):
        raise ValueError(
            f"dims must name one tensor dim for each of the {len(sizes)} mesh axes; got {chosen}."
        )
    if any(not -ndim <= d < ndim for d in chosen):
        raise ValueError(
            f"dims {chosen} must lie in a tensor of {ndim} dims: -{ndim} to {ndim - 1}."
        )
    splits: dict[int, tuple[int, ...]] = {}
    for axis, d in enumerate(chosen):
        splits[d % ndim] = (*splits.get(d % ndim, ()), axis)
    if 1 < len(splits) < len(chosen):
        raise ValueError(
            f"each mesh axis must split a dim of its own, or all axes one dim; got dims {chosen}."
        )
    return splits
