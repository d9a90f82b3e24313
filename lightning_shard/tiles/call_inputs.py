"""Finds the tensors among the arguments of a call that tiles are given parts of."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.tiles.tile_tensor import Tiles, TileTensor
from lightning_shard.tiles.views import fresh


class Inputs:
    """Holds the tensors of a call of which tiles are given parts, or roots.

    Attributes:
        given: Fields and plain tensors that require gradients; a written field is the first.
        target: The written field.

    Args:
        arguments: The arguments of the call.
        target: The written field.
        first: A plain tensor that is written.
    """

    def __init__(
        self, arguments: Any, target: TileTensor | None, first: Tensor | None = None
    ) -> None:
        self.target, self.given, self._keys = target, list[Tensor](), list[Tensor]()
        self._first: dict[int, tuple[Any, Any]] = {}
        self._places: dict[int, int] = {}
        first = first if target is None else target
        if first is not None:
            self._add(first, first)
        self._find(arguments)

    def _find(self, value: Any) -> None:
        if isinstance(value, TileTensor):
            if id(value) not in self._places:
                self._add(value, fresh(value))
        elif isinstance(value, Tensor):
            if value.requires_grad and id(value) not in self._places:
                self._add(value, value)
        elif type(value) in (list, tuple):
            for each in value:
                self._find(each)

    @property
    def pairs(self) -> list[tuple[Any, TileTensor]]:
        """The fields as the call gave them, each with the one of the last write of its base."""
        both = zip(self._keys, self.given, strict=True)
        return [(key, x) for key, x in both if isinstance(x, TileTensor)]

    @property
    def fields(self) -> list[TileTensor]:
        """The fields."""
        return [x for x in self.given if isinstance(x, TileTensor)]

    @property
    def tiles(self) -> Tiles:
        """The tiles of the fields.

        Raises:
            ValueError: Fields were cut by two objects of `Tiles`.
        """
        first, *others = self.fields
        if any(x.tiles is not first.tiles for x in others):
            raise ValueError(
                "the fields of one call were cut by two objects of Tiles; cut all fields of a "
                "computation by one: tiles = Tiles(8), shard(x, tiles, 2), shard(y, tiles, 2)."
            )
        return first.tiles

    @property
    def records(self) -> bool:
        """True if a gradient of the call is wanted."""
        return torch.is_grad_enabled() and any(
            bool(x.roots) or x.has_gradient if isinstance(x, TileTensor) else x.requires_grad
            for x in self.given
        )

    def _add(self, key: Tensor, tensor: Tensor) -> None:
        self._places[id(key)] = len(self.given)
        self._keys.append(key)
        self.given.append(tensor)

    def note_first(self, locals_: Sequence[Any]) -> None:
        """Remember what the first tile is given, which a rule may give back as it is."""
        self._first = {
            id(part.local): (key, part.layout)
            for part, key in zip(locals_, self._keys, strict=True)
            if isinstance(part, Subdomain) and isinstance(key, TileTensor)
        }

    def given_back(self, part: Subdomain) -> TileTensor | None:
        """Return the field whose part a rule gave back, as `x.to(x.dtype)` does."""
        key, layout = self._first.get(id(part.local), (None, None))
        return key if layout == part.layout else None

    def with_locals(self, value: Any, locals_: Sequence[Any]) -> Any:
        """Return arguments with a tile's tensors in the place of these."""
        if isinstance(value, Tensor):
            place = self._places.get(id(value))
            return value if place is None else locals_[place]
        if type(value) in (list, tuple):
            return type(value)([self.with_locals(each, locals_) for each in value])
        return value
