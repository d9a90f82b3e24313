"""Sync batch norm over data replicas x domain equals batch norm of the whole batch."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lightning_shard
from lightning_shard import UnsupportedOperationError

# torch's module refuses the CPU before it applies its Function
on_cpu = mock.patch.object(torch._C, "_get_privateuse1_backend_name", return_value="cpu")


def modules(**options):
    torch.manual_seed(1)
    alone = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, **options)).double()
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, **options)).double()
    )
    synced.load_state_dict(alone.state_dict())
    return alone, synced


@pytest.mark.spmd(4)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}], ids=str)
def test_equals_one_process(options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain"))
    alone, synced = modules(**options)
    for _ in range(2):
        batch = torch.randn(5, 3, 7, 4, dtype=torch.float64, requires_grad=True)
        slope = torch.randn(5, 4, 7, 4, dtype=torch.float64)
        mine = slice(0, 3) if mesh.get_local_rank("data") == 0 else slice(3, 5)
        x = lightning_shard.shard(batch.detach()[mine], mesh["domain"], 2).requires_grad_()
        with on_cpu:
            found = synced(x)
        wanted = alone(batch)
        torch.testing.assert_close(lightning_shard.gather(found), wanted[mine])
        (found.square() * slope[mine]).sum().backward()  # the sum over the replicas' losses
        (wanted.square() * slope).sum().backward()
        torch.testing.assert_close(lightning_shard.gather(x.grad), batch.grad[mine])
    for p, q in zip(synced.parameters(), alone.parameters(), strict=True):
        total = p.grad / 2  # ranks of a domain start from a replica of its loss each
        dist.all_reduce(total)
        torch.testing.assert_close(total, q.grad)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(synced.get_buffer(name), buffer)
    x = lightning_shard.shard(batch.detach()[mine], mesh["domain"], 2)
    torch.testing.assert_close(lightning_shard.gather(synced.eval()(x)), alone.eval()(batch)[mine])


@pytest.mark.spmd(4)
def test_what_is_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain"))
    x = lightning_shard.shard(torch.randn(2, 4, 7, 4), mesh["domain"], 2)
    with pytest.raises(ValueError, match="to be on GPU"):
        nn.SyncBatchNorm(4)(x)
    with on_cpu, pytest.raises(UnsupportedOperationError, match="all ranks"):
        nn.SyncBatchNorm(4, process_group=mesh["data"].get_group())(x)
