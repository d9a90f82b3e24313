"""Sync batch norm takes statistics over all ranks of a process group that holds whole domains.

Ranks that hold the same rows count them alike, so the mean over all ranks is that over all rows.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_shard.domain.comm import all_reduce
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.norm.batch_norm import update_running
from lightning_shard.ops.norm.normalize import normalized
from lightning_shard.ops.registry import implements
from lightning_shard.processes.torch_private.internals import SyncBatchNorm


@implements(
    SyncBatchNorm,
    limits="channels (dim 1) must be whole; the process group must hold the whole domain",
    checked=False,
)
def sync_batch_norm(
    func: Callable[..., Any],
    input: Subdomain,  # noqa: A002 - torch's name of the argument
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    momentum: float,
    group: dist.ProcessGroup,
    world_size: int,
) -> Subdomain:
    """Normalize as `torch.nn.SyncBatchNorm` in training, with gradients of all ranks' losses."""
    x, ranks = input, input.domain.ranks
    if x.layout.axes(1):
        raise UnsupportedOperationError("sync batch norm over split channels (dim 1)")
    if not set(ranks) <= set(dist.get_process_group_ranks(group)):
        raise UnsupportedOperationError(
            f"sync batch norm over a process group without all ranks {ranks} of the domain"
        )
    dims, shape = [d for d in range(x.ndim) if d != 1], [1, -1, *[1] * (x.ndim - 2)]
    wide = x.local.float() if x.dtype.itemsize == 2 else x.local
    rows = x.local.shape[0] * x.local.shape[2:].numel()
    counted = wide.new_tensor([rows])
    counts = all_reduce(counted, group)
    mean = all_reduce(wide.sum(dims), group) / counts
    distance = (wide - mean.view(shape)).square()
    variance = all_reduce(distance.sum(dims), group) / counts
    copies = len(ranks) // x.layout.grid.parts(x.layout.axes())
    count = counts / copies
    unbiased = variance.detach() * (count / (count - 1))
    for buffer, value in ((running_mean, mean.detach()), (running_var, unbiased)):
        update_running(x.domain, buffer, value, momentum)
    weight, bias = (None if v is None else v.view(shape) for v in (weight, bias))
    return x.like(normalized(x.local, mean.view(shape), variance.view(shape), weight, bias, eps))
