"""Which sizes of `activation_offload` cost nothing, by `plan`'s clock."""

from dataclasses import replace

import pytest

import lightning_shard
from lightning_shard.lab.machine import Cluster, Device, Link
from lightning_shard.lab.offload_sizes import SHARES, offload_sizes
from tests.lab.test_plan_of_offload import Net, fields

DEVICE = Device("made up", 10**9, {"float32": 2e10}, 1e12, 1e-9, "made up", host_rate=2e9)


def cluster(host_rate):
    device = replace(DEVICE, host_rate=host_rate)
    return Cluster(device, 1, 1, Link(1e9, 0.0), Link(1e9, 0.0))


def test_smaller_sizes_take_less_memory_and_longer():
    machine = cluster(2e9)
    found = offload_sizes(Net(), fields(), cluster=machine)
    steps = [found.kept, *found.sizes.values()]
    assert len(found.sizes) == len(SHARES)
    assert [step.memory for step in steps] == sorted((s.memory for s in steps), reverse=True)
    assert steps[-1].memory < 0.7 * found.kept.memory
    assert found.free in found.sizes
    assert 1 <= found.times(found.free) <= 1.05
    rows = str(found).splitlines()
    assert [row.split()[0] for row in rows[3:-1]] == ["all", *found.sizes]
    assert rows[-1].startswith(f"{found.free} takes ")
    # a run with that size takes what the table says
    again = lightning_shard.plan(Net(), fields(), cluster=machine, activation_offload=found.free)
    assert (again.seconds, again.memory) == (
        found.sizes[found.free].seconds, found.sizes[found.free].memory,
    )  # fmt: skip


@pytest.mark.slow
def test_a_slow_link_makes_each_size_longer():
    found = offload_sizes(Net(), fields(), cluster=cluster(1e7))
    assert found.times([*found.sizes][-1]) > 2
    slow = replace(found, sizes={size: found.sizes[size] for size in [*found.sizes][-1:]})
    assert slow.free is None
    assert str(slow).endswith("Each size makes a step more than 5 % longer.")


def test_a_mesh_of_another_number_of_ranks():
    with pytest.raises(ValueError, match="the mesh 1x2 has 2 ranks, but the cluster has 1 devices"):
        offload_sizes(Net(), fields(), (1, 2), cluster(2e9))
