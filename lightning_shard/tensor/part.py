"""A split tensor holds this rank's part, in one of several forms."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.view.write_back import refuse_stale
from lightning_shard.processes.torch_private.internals import without_rules

# How to read a tensor with a history of its own, by the class of its grad_fn. The module
# autograd_function.py enters the Functions that it serves.
followed: dict[type, Callable[[Any], "Part"]] = {}


@runtime_checkable
class Part(Protocol):
    """Rows that this rank holds (`Subdomain`), or the recipe of rows that nobody has read yet.

    Attributes:
        shape: The global shape.
        dtype: The dtype that users see.
        layout: The split of the tensor, once that is known.
        local: A local tensor that tells the device, and whether gradients are wanted.
        lazy: True if the part must be read before a rule that knows only `Subdomain` can take it.
    """

    lazy: ClassVar[bool]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that users see."""
        ...

    @property
    def layout(self) -> Layout | None:
        """The split of the tensor; None while it is not known."""
        ...

    @property
    def local(self) -> Tensor:
        """A local tensor that tells the device, and whether gradients are wanted."""
        ...

    def settled(self) -> Subdomain | None:
        """Return the rows for the tensor to hold; None where it cannot hold them."""
        ...

    def read(self) -> Subdomain:
        """Return the rows of this rank.

        Raises:
            UnsupportedOperationError: The part has no rows that could be read.
        """
        ...


def part_of(tensor: Any) -> Part:
    """Return the part of a split tensor.

    Raises:
        UnsupportedOperationError: A foreign autograd.Function put its history on the wrapper. Or
            the rows are a copy, and were written in place, or what they come from was.
    """
    with without_rules():
        foreign, wanted = tensor.grad_fn, tensor.requires_grad
    if foreign is None:
        part = tensor._part
        if wanted and not part.local.requires_grad and torch.is_grad_enabled():
            part.local.requires_grad_()  # autograd has unpacked the wrapper: of nested checkpoints
        if isinstance(part, Subdomain) and part.copied is not None and part.copied.is_stale:
            refuse_stale()
        return part
    follow = followed.get(type(foreign))
    if follow is None:
        if foreign.name() == "ToCopyBackward0":
            raise UnsupportedOperationError(
                "a conversion by torch.as_tensor or torch.asarray would lose the gradients of a "
                "tensor split over ranks; call x.to(dtype)"
            )
        raise foreign_function(type(foreign).__name__.removesuffix("Backward"))
    return follow(tensor)


def foreign_function(name: str) -> UnsupportedOperationError:
    """Return the error for an autograd.Function of this name that nobody allowed."""
    return UnsupportedOperationError(
        f"the autograd.Function {name} was applied to a tensor split over ranks; its gradients "
        "would be lost. Allow it with lightning_shard.allow_function if it computes with torch "
        "functions, run it on each rank's rows with lightning_shard.local_map, or on whole "
        "tensors with lightning_shard.allow_gather"
    )
