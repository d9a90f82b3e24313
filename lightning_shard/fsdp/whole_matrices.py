"""Gives torch's Muon whole matrices.

Muon makes the singular values of each gradient alike, which no rank can do with its rows. Sharded
matrices could be multiplied as they are, but each product of the iteration would travel, its sums
would be rounded to bfloat16 in another order than in one process, and torch refuses fewer rows than
ranks. So each gradient is gathered once, and every rank iterates as one process does.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.processes.torch_private.internals import replace_internal


@functools.cache
def give_whole_matrices() -> None:
    """Let Muon gather the gradient of one matrix after the other, from now on."""
    replace_internal("torch.optim._muon._zeropower_via_newtonschulz", _of_whole)


def _of_whole(iterate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(iterate)
    def wrapped(grad: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(grad, DTensor):
            return iterate(grad, *args, **kwargs)
        whole = iterate(grad.full_tensor(), *args, **kwargs)
        return distribute_tensor(whole, grad.device_mesh, grad.placements, src_data_rank=None)

    return wrapped
