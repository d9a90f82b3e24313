"""Moves rows to places that values decide: masks and index tensors, known only at run time.

A transfer is a linear map from the rows of all ranks to the rows of all ranks. Turned around, it is
its own adjoint: what was taken becomes what is put. So it has derivatives of any order.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.forward_mode import with_tangent
from lightning_shard.domain.wire import all_to_all


@dataclass(frozen=True, eq=False)
class Transfer:
    """The rows of the first dim that travel, and where they are put, seen from one rank.

    Attributes:
        taken: The local rows that go, those for the first rank first.
        given: Number of rows that go to each rank of the group.
        put: The places of the rows that come, those of the first rank first. Rows that come to one
            place are added up; where none comes there is zero.
        got: Number of rows that come from each rank.
        rows: Number of this rank's rows before, and after.
        taken_often: True if a row may be taken several times.
        put_often: True if several rows may be put at one place.
    """

    taken: Tensor
    given: list[int]
    put: Tensor
    got: list[int]
    rows: tuple[int, int]
    taken_often: bool = False
    put_often: bool = False

    @property
    def turned(self) -> "Transfer":
        """The adjoint."""
        rows = self.rows[1], self.rows[0]
        often = self.put_often, self.taken_often
        return Transfer(self.put, self.got, self.taken, self.given, rows, *often)


def transferred(x: Tensor, transfer: Transfer, group: dist.ProcessGroup) -> Tensor:
    """Move the rows of all ranks to where `transfer` puts them; all ranks of the group call it."""
    return _Transfer.apply(with_tangent(x), transfer, group)


class _Transfer(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer, group: dist.ProcessGroup) -> Tensor:
        ctx.plan = transfer, group
        row = x.shape[1:]
        came = x.index_select(0, transfer.taken)
        if len(transfer.given) > 1:
            unit = math.prod(row)
            sizes, given = ([unit * n for n in count] for count in (transfer.got, transfer.given))
            came = all_to_all(came.reshape(-1), sizes, given, group)
            came = came.view(sum(transfer.got), *row)
        result = x.new_zeros(transfer.rows[1], *row)
        put = result.index_add_ if transfer.put_often else result.index_copy_
        return put(0, transfer.put, came)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        transfer, group = ctx.plan
        return transferred(grads[0], transfer.turned, group), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Transfer.apply(tangents[0], *ctx.plan)
