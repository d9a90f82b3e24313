import pytest
import torch
import torch.distributed as dist

import lightning_shard
from lightning_shard.trainer.profile.traffic import counted
from tests.parity import mesh_of


@pytest.mark.spmd(3)
def test_counts_what_this_rank_sends():
    x = torch.zeros(6, 2)
    with counted() as traffic:
        dist.all_to_all_single(torch.empty_like(x), x)
    assert (traffic.calls, traffic.bytes) == (1, 4 * 2 * 4)
    with counted() as traffic:
        dist.all_to_all(list(torch.empty(3, 5)), list(torch.zeros(3, 5)))
        dist.all_gather_into_tensor(torch.empty(18, 2), x)
        dist.reduce_scatter_tensor(torch.empty(2, 2), x)
        dist.all_reduce(x)
    assert (traffic.calls, traffic.bytes) == (4, 40 + 96 + 32 + 64)


@pytest.mark.spmd(3)
def test_counts_a_gather():
    x = lightning_shard.shard(torch.zeros(2, 7), mesh_of(3), 1)
    with counted() as traffic:
        lightning_shard.gather(x)
    assert traffic.bytes == x.to_local().nbytes * 2
