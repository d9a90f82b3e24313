"""Holds the places of an operation in the caller's graph, and in the small one of each tile."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_shard.tiles.tile_tensor import Tiles, TileTensor

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge

    from lightning_shard.domain.layout import Layout


class Root:
    """Holds an input at which a small graph of each tile begins.

    Attributes:
        input: The caller's tensor, or one without memory that has its place in the graph.
        edges: Where the gradient of each tile arrives.
        layouts: The layout of a field on each tile; None of a plain tensor.
        crosses: True if the small graphs that begin here are one graph of all tiles.
    """

    __slots__ = ("crosses", "edges", "input", "layouts")

    def __init__(self, input: Tensor, tiles: int) -> None:  # noqa: A002 - autograd's word
        self.input, self.crosses = input, False
        self.edges: list[GradientEdge | None] = [None] * tiles
        self.layouts: list[Layout] | None = None


class Output:
    """Holds a tensor that an operation gives.

    Attributes:
        tensor: The caller's tensor.
        edges: The place of each tile's tensor in the small graphs; None without a gradient.
        layouts: The layout of a field on each tile; None of a plain tensor.
        is_partial: True for a sum over the tiles.
    """

    __slots__ = ("edges", "is_partial", "layouts", "tensor")

    def __init__(self, tensor: Tensor, tiles: int) -> None:
        self.tensor, self.is_partial = tensor, False
        self.edges: list[GradientEdge | None] = [None] * tiles
        self.layouts: list[Layout] | None = None


class Record:
    """Keeps the places of an operation in the graphs, for its backward pass.

    Attributes:
        in_turns: True if the tiles have exchanged, each in its turn, and will in backward.
        extra: The number of inputs after those of the roots, which get no gradient.
    """

    __slots__ = ("extra", "in_turns", "outputs", "roots", "tiles")

    def __init__(
        self, tiles: Tiles, roots: list[Root], outputs: list[Output], *, in_turns: bool, extra: int
    ) -> None:
        self.tiles, self.roots, self.extra = tiles, roots, extra
        self.outputs, self.in_turns = outputs, in_turns

    @property
    def crosses(self) -> bool:
        """True if its small graphs are one graph of all tiles."""
        return any(root.crosses for root in self.roots)


# lets small graphs begin at tensors that are no leaves
SEED = torch.zeros((), requires_grad=True, device="cpu")


class Begin(Function):
    """Begins small graphs: the tensors themselves; one that comes alone may be written in place."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, *given: Tensor) -> Any:
        """Return tensors of the same memory."""
        found = [x.detach() for x in given]
        return tuple(found) if len(found) > 1 else found[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Refuse to go on: a small graph ends at its roots."""
        raise AssertionError("a small graph ends at its roots")


class BeginHalf(Function):
    """Begins a small graph at a tensor of half precision: gradients of tiles add up in float32."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, given: Tensor) -> Tensor:
        """Return a tensor of the same memory, whose gradient goes to a place in float32."""
        return given.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient in float32."""
        return grads[0].float(), None


class Place(Function):
    """A tensor without memory that has the place of a field in the caller's graph."""

    @staticmethod
    def forward(ctx: Any, x: TileTensor) -> TileTensor:
        """Return a field without parts."""
        return TileTensor(x.tiles, [], like=x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient as it is."""
        return grads[0]
