"""A `Canvas` is a spectrum that is written: zeros to which modes of split tensors are assigned.

In `out = torch.zeros(...); out[slices] = modes` the plain tensor becomes a `Canvas`, which records
the assignment; the inverse transform reads the recorded modes, and nothing else is ever stored.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Seen, Subdomain
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

    @staticmethod
    def like(plain: Tensor) -> "Canvas":
        """Make a canvas in place of a plain tensor of zeros.

        Raises:
            UnsupportedOperationError: The tensor is not of zeros, or needs a gradient.
        """
        # a step that is planned has no numbers; its tensors are equal
        values = torch.view_as_real(plain.detach().resolve_conj())  # equal knows no complex32
        is_zero = torch.equal(values, values.new_zeros(()).expand_as(values))
        if plain.requires_grad or not is_zero:
            raise UnsupportedOperationError(
                "modes of a split tensor can be assigned to a plain tensor of zeros only"
            )
        return Canvas.of(tuple(plain.shape), plain.dtype, plain.device)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def layout(self) -> Layout | None:
        """The split of the modes written last; None before the first."""
        return self.writes[-1].modes.layout if self.writes else None

    def read(self) -> Subdomain:
        """Refused: only an inverse transform reads what was assigned."""
        raise UnsupportedOperationError(
            "only an inverse transform can follow an assignment of modes"
        )

    def settled(self) -> Subdomain:
        """Refused, as `read`."""
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

    def assign(self, index: Any, value: Subdomain) -> None:
        """Record that modes were assigned to a slice; nothing travels yet."""
        entries = expanded_index(len(self.shape), index)
        slices: list[slice] = [e for e in entries if isinstance(e, slice)]
        if len(slices) < len(entries):
            raise UnsupportedOperationError("modes are assigned to slices of a spectrum")
        positions = tuple(shown[s] for shown, s in zip(self.order, slices, strict=True))
        if value.shape != tuple(map(len, positions)):
            raise UnsupportedOperationError(
                f"modes of shape {value.shape} assigned to a place of shape "
                f"{tuple(map(len, positions))}"
            )
        for write in self.writes:
            if all(set(a) & set(b) for a, b in zip(write.positions, positions, strict=True)):
                raise UnsupportedOperationError("two assignments of modes to the same place")
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


def without_lost_graph(x: Tensor) -> Tensor:
    """Return what is computed with later, perhaps where gradients are recorded again."""
    return x.detach() if x.requires_grad and not torch.is_grad_enabled() else x


@lru_cache(maxsize=512)
def _moved(at: Positions, extent: int, order: Callable[[Positions], Positions]) -> Positions:
    """The positions that those in `at` have after `order`."""
    moved = {old: new for new, old in enumerate(order(range(extent)))}
    return tuple(moved[p] for p in at)
