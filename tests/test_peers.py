"""The benchmark beside other packages: what of it needs no other package."""

import subprocess
from unittest import mock

import pytest

from benchmarks import peers


@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", peers.NETWORKS)
def test_ways_without_the_peer(name):
    """The split field gives the loss of one process, and each way is timed on all ranks."""
    assert peers.error_of(name, "lightning_shard", 64) < 1e-5
    ways = ["limit", "whole", "lightning_shard"]
    found = peers.costs(name, ways, 64, rounds=1)
    assert list(found) == ways
    assert all(cpu > 0 and wall > 0 for cpu, wall in found.values())


def test_table():
    found = {"limit": (0.02, 0.03), "whole": (0.05, 0.06)}
    assert peers.rows_of("CNN", found, {"ShardTensor": "no CUDA"}) == [
        ["CNN", "limit", "20", "1.00", "30", ""],
        ["CNN", "whole", "50", "2.50", "60", ""],
        ["CNN", "ShardTensor", "", "", "", "no CUDA"],
    ]


def test_a_way_that_fails_says_why():
    with mock.patch.object(peers, "start", side_effect=RuntimeError("on rank 1:\n\nno CUDA\n")):
        assert peers.refusal("ViT", "ShardTensor", 64) == "no CUDA"
    with mock.patch.object(peers, "start", return_value=0.5):
        assert peers.refusal("ViT", "ShardTensor", 64) == "its loss is wrong by 50%"


def test_the_environment_is_made_once(tmp_path):
    """With this package and the peer of one version; a second run takes it as it is."""
    with mock.patch.object(subprocess, "run") as run:
        python = peers.environment(tmp_path)
    commands = [call.args[0] for call in run.call_args_list]
    assert commands[0][1:] == ["-m", "venv", tmp_path]
    assert commands[1][0] == python
    assert commands[1][-2:] == ["nvidia-physicsnemo==2.2.2", "torch==2.13.*"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with mock.patch.object(subprocess, "run") as run:
        assert peers.environment(tmp_path) == python
    assert not run.called
