"""The benchmark beside other packages: what of it needs no other package."""

import subprocess
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import dispatch, peer_on_cpus, peers, step_traffic
from benchmarks.networks import IN_FLOAT32
from benchmarks.peers import StepCost
from lightning_shard.trainer.profile.traffic import counted
from tests.pairs import choose


@pytest.mark.quick_rows("tutorial CNN")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", choose(peers.NETWORKS, fast=["tutorial CNN", "TFNO"]))
def test_ways_without_the_peer(name):
    """The split field gives the loss of one process, and each way is timed on all ranks."""
    assert peers.error_of(name, "lightning_shard", 64) < (1e-5 if name in IN_FLOAT32 else 1e-10)
    ways = ["limit", "whole", "lightning_shard"]
    found = peers.costs(name, ways, 64, rounds=1)
    assert list(found) == ways
    assert all(cost.cpu > 0 and cost.wall > 0 for cost in found.values())
    assert found["limit"].collectives == found["whole"].sent == 0
    split, whole = found["lightning_shard"], found["whole"]
    assert split.collectives > 0
    assert split.sent > 0
    assert split.activations < 0.8 * whole.activations


@pytest.mark.spmd(2)
def test_price_of_calls():
    rows = [
        dict(zip(dispatch.HEAD, row, strict=True))
        for row in dispatch.costs(["relu", "conv3x3"], count=2)
    ]
    assert [row["function"] for row in rows] == ["relu", "relu", "conv3x3", "conv3x3"]
    assert all(float(row[side]) > 0 for row in rows for side in ("plain", "ours"))
    assert rows[2]["DTensor"] == rows[0]["no wire"] == ""  # DTensor's convolution is wrong


@pytest.mark.spmd(3)
def test_what_is_sent_is_what_our_counter_says():
    x = torch.zeros(6, 2)
    with step_traffic.Seen() as seen, counted() as traffic:
        dist.all_to_all_single(torch.empty_like(x), x)
        dist.all_to_all_single(x.new_empty(3, 2), x.new_empty(3, 2), [1, 1, 1], [1, 1, 1])
        dist.all_to_all(list(torch.empty(3, 5)), list(torch.zeros(3, 5)))
        dist.all_gather_into_tensor(torch.empty(18, 2), x)
        dist.reduce_scatter_tensor(torch.empty(2, 2), x)
        dist.all_reduce(x)
    assert (seen.collectives, seen.sent) == (traffic.calls, traffic.bytes)


def test_attention_that_stands_for_the_kernel_of_cuda():
    """The peer scales by what it is given, and hands the sums back with one dim more."""
    q, k, v, grad = torch.randn(4, 1, 2, 8, 4, dtype=torch.double).unbind()
    given = [t.requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3)
    found = peer_on_cpus.attention(q, k, v, None, True, scale=0.3)
    torch.testing.assert_close(found[0], expected)
    seed, sums, mask = found[2], found[1].unsqueeze(-1), [True] * 3
    gradients = peer_on_cpus.attention_backward(
        grad, q, k, v, None, found[0], sums, seed, seed, 0.0, mask, scale=0.3
    )
    torch.testing.assert_close(gradients[:3], torch.autograd.grad(expected, given, grad))


def test_table():
    found = {"limit": StepCost(0.02, 0.03), "whole": StepCost(0.05, 0.06, 7, 2e6, 2**20)}
    assert peers.rows_of("CNN", found, {"ShardTensor": "no CUDA"}) == [
        ["CNN", "limit", "20", "1.00", "30", "0", "0.00", "0.0", ""],
        ["CNN", "whole", "50", "2.50", "60", "7", "2.00", "1.0", ""],
        ["CNN", "ShardTensor", "", "", "", "", "", "", "no CUDA"],
    ]


def test_a_way_that_fails_says_why():
    with mock.patch.object(peers, "start", side_effect=RuntimeError("on rank 1:\n\nno CUDA\n")):
        assert peers.refusal("ViT", "ShardTensor", 64) == "no CUDA"
    with mock.patch.object(peers, "start", return_value=0.5):
        assert peers.refusal("ViT", "ShardTensor", 64) == "its loss is wrong by 0.5"


def test_the_environment_is_made_once(tmp_path):
    """With this package and the peer of one version; a second run takes it as it is."""
    with mock.patch.object(subprocess, "run") as run:
        python = peers.environment(tmp_path)
    commands = [call.args[0] for call in run.call_args_list]
    assert commands[0][1:] == ["-m", "venv", tmp_path]
    assert commands[1][0] == python
    assert commands[1][-2:] == ["nvidia-physicsnemo==2.2.2", "torch===2.13.0"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with mock.patch.object(subprocess, "run") as run:
        assert peers.environment(tmp_path) == python
    assert not run.called
