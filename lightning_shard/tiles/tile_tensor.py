"""A `TileTensor` shows a whole field and holds its parts, all of them in this process."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.torch_private.internals import (
    any_is_true,
    copy_of_tensor,
    forbid_memory,
    make_wrapper,
    with_keys,
    without_rules,
)
from lightning_shard.tensor.local_mesh import LocalField, LocalMesh
from lightning_shard.tensor.met import SplitInTransform
from lightning_shard.tensor.part import Part
from lightning_shard.tiles.crew import Crew
from lightning_shard.tiles.mover import Mover
from lightning_shard.tiles.tile_domain import TileDomain

aten = torch.ops.aten


_NO_MEMORY = (
    "a field in tiles has no memory of its own, as data_ptr() and to_dlpack() need it; take "
    "lightning_shard.gather(tensor)."
)


class Tiles(LocalMesh):
    """The tiles of one device, in the place of a mesh: `shard(x, Tiles(8), 2)`.

    Operations on a field in tiles run for all of them, one after the other, in this process. All
    fields of a computation are cut by one object.

    Args:
        sizes: The number of tiles, or the number along each axis of their grid.
        mover: Moves tensors of waiting tiles to other memory; None: they stay.

    Raises:
        ValueError: A number of tiles is smaller than 1.
    """

    def __init__(self, sizes: int | Sequence[int], mover: Mover | None = None) -> None:
        sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        if not sizes or min(sizes) < 1:
            raise ValueError(f"tiles must be a number from 1 on along each axis; got {sizes}.")
        self.sizes, self.count = sizes, math.prod(sizes)
        self.ndim = len(sizes)
        self.crew = Crew(self.count, mover)
        self.domains = [TileDomain(self.crew, sizes, tile) for tile in range(self.count)]

    def members_along(self, tile: int, axis: int) -> tuple[int, ...]:
        """Return the tiles that differ from one in their place along an axis alone."""
        group: Any = self.domains[tile].group((axis,))
        return group.members

    def keep(self, tensor: Tensor) -> None:
        """Let a tensor that the caller is given stay where it is."""
        if self.crew.mover is not None:
            self.crew.mover.stay(tensor)

    def close(self) -> None:
        """End the threads of the tiles."""
        self.crew.close()

    def __copy__(self) -> "Tiles":
        """Return the same tiles: a copied module computes with fields that these have cut."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tiles":
        """Return the same tiles, too."""
        return self

    def __reduce__(self) -> Any:
        """Pickle the numbers of tiles alone: threads and a mover belong to the process."""
        return Tiles, (self.sizes,)

    def cut(self, tensor: Tensor, dims: int | Sequence[int]) -> "TileTensor":
        """Cut a whole tensor into tiles."""
        return TileTensor.cut(self, tensor, dims)

    def cut_by(
        self,
        shape: Sequence[int],
        dims: int | Sequence[int],
        read: Callable[[tuple[slice, ...]], Tensor],
    ) -> "TileTensor":
        """Make a field of which `read` gives the rows of each tile."""
        return TileTensor.made_by(self, shape, dims, read)


class View:
    """Tells of which field another one is a view.

    Attributes:
        base: The field that is shown, itself no view.
        again: A function that takes the view of the base anew.
        seen: The number of writes of the base that the view's graph knows.
    """

    __slots__ = ("again", "base", "seen")

    def __init__(self, base: "TileTensor", again: Callable[[Any], Any]) -> None:
        self.base, self.again, self.seen = base, again, base.writes


class TileTensor(LocalField):
    """Holds all parts of a field in tiles, and its place in the caller's graph.

    Attributes:
        tiles: The tiles.
        parts: The part of each tile.
        roots: The places where small graphs begin, of a field that nobody has computed yet.
        placed: A tensor without memory at its place in the graph, once one was needed.
        view_of: Set where it is a view of another field.
        writes: The number of writes that its graph has recorded.
        changes: The number of all writes, also of those without a graph.
    """

    tiles: Tiles
    parts: list[Any]
    roots: tuple[Any, ...]
    placed: Tensor | None
    view_of: View | None
    writes: int
    changes: int
    run: Callable[..., Any]  # set by dispatch.py
    cut: Callable[..., "TileTensor"]  # set by whole.py
    made_by: Callable[..., "TileTensor"]
    join: Callable[["TileTensor"], Tensor]

    @staticmethod
    def __new__(
        cls,
        tiles: Tiles,
        parts: Sequence[Part],
        *,
        roots: tuple[Any, ...] = (),
        like: "TileTensor | None" = None,
    ) -> "TileTensor":
        for part in parts:
            if isinstance(part, Subdomain):
                part.check()
        first: Any = parts[0] if like is None else like
        device = first.device if like is not None else first.local.device
        made: Any = make_wrapper(
            cls, first.shape, dtype=first.dtype, device=device, requires_grad=False
        )
        forbid_memory(made, _NO_MEMORY)
        made.tiles, made.parts, made.roots = tiles, list(parts), roots
        made.placed = made.view_of = None
        made.writes = made.changes = 0
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: the tensor is made."""

    @property
    def _part(self) -> Part:
        """The part of the first tile, which tells what all have in common."""
        return self.parts[0]

    @property
    def is_lazy(self) -> bool:
        """True if nobody has computed the parts yet."""
        return bool(self.parts) and self.parts[0].lazy

    @property
    def has_gradient(self) -> bool:
        """True if the field requires a gradient."""
        with without_rules():
            return self.requires_grad

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return TileTensor.run(func, args, kwargs or {}, types)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Serve what autograd itself does with gradients and leaves."""
        known = OF_AUTOGRAD.get(func)
        if known is None:
            raise UnsupportedOperationError(
                f"{func} reached a field in tiles without passing a rule; register one "
                "(lightning_shard.register_rule) or gather first (lightning_shard.gather)."
            )
        with torch.no_grad(), with_keys("Conjugate", "Negative"):
            return known(*args, **(kwargs or {}))

    @property
    def split_dims(self) -> tuple[int, ...]:
        """The dims along which it is cut."""
        return self.parts[0].layout.split_dims

    def whole(self) -> Tensor:
        """Return the whole tensor; differentiable."""
        return TileTensor.join(self)

    def to_local(self) -> Tensor:
        """Refuse: the caller has no part of its own.

        Raises:
            UnsupportedOperationError: Always.
        """
        raise UnsupportedOperationError(
            "to_local() gives the part of a rank, and a field in tiles has one for each tile: take "
            "lightning_shard.gather(x), or let lightning_shard.local_map(function)(x) see each part"
        )

    def as_subclass(self, cls: Any) -> Any:
        """Refuse a class of another package, as torchvision's `Image`.

        Raises:
            UnsupportedOperationError: The class is no plain tensor.
        """
        if cls is Tensor:
            with without_rules():
                return super().as_subclass(cls)
        raise UnsupportedOperationError(
            f"a field in tiles cannot be of class {cls.__name__}; call functions, such as those of "
            "torchvision.transforms.v2, with the field as it is"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "TileTensor":
        """A copy of all parts; as in torch, only of a leaf."""
        with without_rules():
            if not self.is_leaf:
                raise RuntimeError(
                    "only fields created explicitly by the user support deepcopy; take "
                    "x.detach().clone() of a result."
                )
            wants = self.requires_grad
        with torch.no_grad():
            copied = self.clone()
        with without_rules():
            memo[id(self)] = made = copied.requires_grad_(wants)
        assert isinstance(made, TileTensor)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a field in tiles cannot be pickled; pickle lightning_shard.gather(tensor) instead."
        )


def _detached(x: TileTensor, **_: Any) -> TileTensor:
    return TileTensor(x.tiles, x.parts, like=x if not x.parts else None)


def _same_view(x: TileTensor, shape: Sequence[int]) -> TileTensor:
    """Serve `x.view_as(x)`; a view of another shape is one that vmap takes."""
    if tuple(shape) != tuple(x.shape):
        raise SplitInTransform
    return _detached(x)


def _by(function: Callable[..., Any], given: int = 1) -> Callable[..., Any]:
    """Return what runs the rule of a function on so many of an operator's arguments.

    Not by a call of the function, which would come back to the operator where a caller has switched
    `__torch_function__` off.
    """
    return lambda *args, **_: TileTensor.run(function, args[:given], {})


def _added(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return TileTensor.run(torch.add, (x, y), {"alpha": alpha})


def _copied(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return TileTensor.run(*((Tensor.to, (x, dtype)) if dtype else (torch.clone, (x,))), {})


# operators that autograd itself runs; a dispatch mode of the user, such as FlopCounterMode, is
# given them, and calls them once more
OF_AUTOGRAD: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detached,
    aten.alias.default: _detached,
    aten.view.default: _same_view,
    aten.clone.default: _by(torch.clone),
    aten.add.Tensor: _added,
    aten.add_.Tensor: _by(Tensor.add_, 2),
    aten.mul.Tensor: _by(torch.mul, 2),
    aten.neg.default: _by(torch.neg),
    aten.zeros_like.default: _by(torch.zeros_like),
    aten.ones_like.default: _by(torch.ones_like),
    aten.empty_like.default: _by(torch.empty_like),
    aten.new_empty_strided.default: _by(torch.empty_like),
    aten.copy_.default: _by(Tensor.copy_, 2),
    aten.zero_.default: _by(Tensor.zero_),
    aten.isnan.default: _by(torch.isnan),
    aten.any.default: _by(torch.any),
    any_is_true: _by(torch.any),
    copy_of_tensor: _copied,
}
