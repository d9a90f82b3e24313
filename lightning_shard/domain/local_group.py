"""A group whose members are all in this process: the tiles of one device.

What ranks ask `torch.distributed`, rules ask through the functions of this file and of wire.py. So
they serve ranks and tiles alike.

Where an exchange is the last of a rule, the rule may give back a `Later`: what it will have once
all members have brought their values. Then no member waits within its rule, and none needs a thread
of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from lightning_shard.domain.forward_mode import in_forward_mode

T = TypeVar("T")
R = TypeVar("R")


class Later(Generic[T]):
    """A value that is there once all members have brought theirs.

    Args:
        read: Returns the value, or another one that is there later.
    """

    def __init__(self, read: "Callable[[], T | Later[T]]") -> None:
        self.read = read


def after(value: T | Later[T], rest: Callable[[T], R]) -> R:
    """Go on with the value of an exchange, at once or when it is there.

    Returns:
        What `rest` gives. It is a `Later` if the value is one; only a rule's caller sees that.
    """
    if isinstance(value, Later):
        later = cast("Later[T]", value)
        return cast("R", Later(lambda: after(later.read(), rest)))
    return rest(value)


class LocalGroup(ABC):
    """Members that exchange tensors within one process.

    Attributes:
        rank: The place in the group of the member that holds this object.
    """

    rank: int

    @abstractmethod
    def size(self) -> int:
        """Return the number of members."""

    @abstractmethod
    def exchange(self, outgoing: Tensor, sizes: Sequence[int], given: Sequence[int]) -> Tensor:
        """Give each member its piece of `outgoing`, flat, and return the pieces that come.

        Args:
            outgoing: The pieces for all members, one after the other, of one dim.
            sizes: The number of elements that come from each member.
            given: The number of elements for each member.
        """

    @abstractmethod
    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Replace `x` by the sum, maximum or minimum over the members."""

    @property
    @abstractmethod
    def joins(self) -> bool:
        """True while the graphs of the members may be one, which `together` makes."""

    @property
    @abstractmethod
    def moves(self) -> bool:
        """True while tensors of members may leave memory, so that each is best read alone."""

    @abstractmethod
    def together(self, value: Any, compute: Callable[[list[Any]], list[Any]]) -> Any:
        """Bring a value, and return what `compute` gives this member, with its graph."""

    @abstractmethod
    def later(self, value: Any, compute: Callable[[list[Any]], list[Any]]) -> Later[Any]:
        """Bring a value as `together` does, without waiting for the other members.

        It is the last exchange of a rule, whose result is made by `after`.
        """

    @abstractmethod
    def objects(self, value: Any) -> list[Any]:
        """Return the `value` of each member."""


def local(group: Any) -> LocalGroup | None:
    """Return a group of members of this process; None for a group of processes."""
    if isinstance(group, dist.ProcessGroup):  # to ask an abstract class takes longer
        return None
    return group if isinstance(group, LocalGroup) else None


def joining(group: Any) -> LocalGroup | None:
    """Return a group of members whose graphs may be one; None for any other group."""
    here = local(group)
    return here if here is not None and here.joins and not in_forward_mode() else None


def rank_in(group: dist.ProcessGroup) -> int:
    """Return the place of this rank, or of this tile, in its group."""
    here = local(group)
    return dist.get_rank(group) if here is None else here.rank


def ranks_in(group: dist.ProcessGroup) -> int:
    """Count the ranks, or the tiles, of a group."""
    here = local(group)
    return dist.get_world_size(group) if here is None else here.size()


def gathered_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gather the `value` of each rank of the group, on every rank."""
    here = local(group)
    if here is not None:
        return here.objects(value)
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
