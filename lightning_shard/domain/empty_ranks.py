"""Keeps the graphs of all ranks alike where a rank has no rows.

Every rank must take part in every collective of the backward pass, those of a user's hooks of
parameters too, so gradients must arrive in the same order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_shard.domain.memory_format import format_of


def concatenated(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat`, also for pieces of one dim without rows, which it drops from the graph.

    A rank whose gradient lacks what the others' have would leave them waiting in a collective.
    """
    if pieces[0].ndim > 1:
        stored = format_of(max(pieces, key=Tensor.numel))
        result = torch.cat(list(pieces), dim)  # which lies otherwise where a piece has no rows
        return (
            result if stored == torch.contiguous_format else result.contiguous(memory_format=stored)
        )
    return torch.cat([piece.unsqueeze(0) for piece in pieces], 1).squeeze(0)


def empty_attached(shape: Sequence[int], *sources: Tensor | None) -> Tensor:
    """Make a tensor without elements, or of zeros, that depends on `sources`.

    A rank without rows must still take part in every collective of the backward pass, and give each
    parameter a gradient (of zeros). Each of these has memory of its own, since gradients are summed
    over ranks in place. They arrive in the order of `sources`, as from one node of torch with these
    operands: autograd begins with the node that was made last.
    """
    kept = [s for s in sources if s is not None]
    pieces = [s.flatten()[:0].to(kept[0].dtype) for s in reversed(kept)]
    nothing = concatenated(pieces, 0)
    nothing = nothing.sum(dtype=kept[0].dtype)  # which autocast would change
    return nothing * kept[0].new_ones(tuple(shape))
