"""A `Canvas` is a spectrum that is written: zeros to which modes of split tensors are assigned.

In `out = torch.zeros(...); out[slices] = modes` the plain tensor becomes a `Canvas`, which records
the assignment; the inverse transform reads the recorded modes. Any other function makes it an
ordinary split tensor first, into which the recorded modes are written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Seen, Subdomain
from lightning_shard.ops.view.assign import layout_of_target, setitem
from lightning_shard.ops.view.entries import expanded_index

Positions = range | tuple[int, ...]


@dataclass(frozen=True)
class Write:
    """Modes assigned to a canvas: `modes` stand at `positions` of each dim.

    They are not copied before the inverse transform reads them; `seen` tells a write in between.
    """

    modes: Subdomain
    positions: tuple[Positions, ...]
    seen: Seen


@dataclass
class Canvas:
    """A spectrum that is zero but for the recorded assignments.

    A dataclass that is changed in place, because assignment to a tensor is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    writes: list[Write]
    order: tuple[Positions, ...]  # position in the canvas as it was made, for each index shown now
    local: Tensor  # without elements, for its device
    lazy: ClassVar[bool] = True

    @staticmethod
    def of(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "Canvas":
        """Make a canvas of zeros of this shape."""
        order = tuple(map(range, shape))
        return Canvas(shape, dtype, [], order, torch.empty(0, dtype=dtype, device=device))

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def layout(self) -> Layout | None:
        """The split of the modes written last; None before the first."""
        return self.writes[-1].modes.layout if self.writes else None

    def read(self) -> Subdomain:
        """Return a split tensor of zeros with the recorded modes, split as the last of them.

        Raises:
            UnsupportedOperationError: Nothing was assigned, the halves were shifted since, or modes
                were written after they were assigned.
        """
        writes = self.written()
        places = [[at for at in w.positions if isinstance(at, range)] for w in writes]
        if not writes or any(len(place) < len(self.shape) for place in places):
            raise UnsupportedOperationError(
                "only an inverse transform can follow a shift of modes, or no assignment of any"
            )
        slices = [tuple(slice(at.start, at.stop, at.step) for at in place) for place in places]
        modes = writes[-1].modes
        layout = layout_of_target(self.shape, slices[-1], modes)
        part = modes.like(modes.local.new_zeros(layout.local_shape), layout)
        for place, write in zip(slices, writes, strict=True):
            setitem(Tensor.__setitem__, part, place, write.modes)
        return part

    def settled(self) -> Subdomain:
        """Return `read` with the graph of the modes; a tensor that keeps it can be written."""
        is_inference = any(write.modes.local.is_inference() for write in self.writes)
        with torch.inference_mode(is_inference), torch.enable_grad():
            return self.read()

    def written(self) -> list[Write]:
        """Return the assignments, for an inverse transform.

        Raises:
            UnsupportedOperationError: Modes were written after they were assigned.
        """
        if any(write.seen.is_stale for write in self.writes):
            raise UnsupportedOperationError(
                "modes were assigned to a spectrum, and written in place since: torch would show "
                "the old values. Assign modes.clone()"
            )
        return self.writes

    def takes(self, index: Any, shape: Sequence[int]) -> bool:
        """Return whether modes of a shape can be recorded: at slices that hold none yet."""
        positions = self._positions(index)
        return (
            positions is not None
            and tuple(shape) == tuple(map(len, positions))
            and not any(
                all(set(a) & set(b) for a, b in zip(write.positions, positions, strict=True))
                for write in self.writes
            )
        )

    def _positions(self, index: Any) -> tuple[Positions, ...] | None:
        entries = expanded_index(len(self.shape), index, lists=True)
        slices: list[slice] = [entry for entry in entries if isinstance(entry, slice)]
        if len(slices) < len(entries):
            return None
        return tuple(shown[s] for shown, s in zip(self.order, slices, strict=True))

    def assign(self, index: Any, value: Subdomain) -> None:
        """Record that modes were assigned to slices that take them; nothing travels yet."""
        positions = self._positions(index)
        assert positions is not None
        modes = without_lost_graph(value.local.to(self.dtype))
        self.writes.append(Write(value.like(modes), positions, Seen.of(modes)))

    def moved_by(self, order: dict[int, Callable[[Positions], Positions]]) -> "Canvas":
        """Return a canvas that has at index i what is at index order(i) of this one."""
        writes = [
            replace(
                w,
                positions=tuple(
                    _moved(at, self.shape[d], order[d]) if d in order else at
                    for d, at in enumerate(w.positions)
                ),
            )
            for w in self.written()
        ]
        canvas = Canvas.of(self.shape, self.dtype, self.local.device)
        canvas.writes += writes
        return canvas


def has_values(x: Tensor) -> bool:
    """Return whether a plain complex tensor is not of zeros; one that is planned has no numbers."""
    values = torch.view_as_real(x.detach().resolve_conj())  # equal knows no complex32
    return not torch.equal(values, values.new_zeros(()).expand_as(values))


def without_lost_graph(x: Tensor) -> Tensor:
    """Return what is computed with later, perhaps where gradients are recorded again."""
    return x.detach() if x.requires_grad and not torch.is_grad_enabled() else x


@lru_cache(maxsize=512)
def _moved(at: Positions, extent: int, order: Callable[[Positions], Positions]) -> Positions:
    """The positions that those in `at` have after `order`."""
    moved = {old: new for new, old in enumerate(order(range(extent)))}
    return tuple(moved[p] for p in at)
