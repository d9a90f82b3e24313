"""Predicted scaling: the splits that are tried, and the ways that are reckoned beside them."""

import pytest

from lightning_shard.lab.clusters import LINKS, read_cluster

pytestmark = pytest.mark.slow


def test_splits():
    from benchmarks.scaling import domains

    assert list(domains(8, (64, 64, 64))) == [(8,), (4, 2), (2, 2, 2)]
    assert list(domains(8, (4, 64))) == [(4, 2)]  # 4 rows are no slabs for 8 ranks


def test_other_ways_and_a_tiny_field():
    from benchmarks.scaling import (
        WORKLOADS,
        UNet3d,
        Workload,
        others,
        part_of,
        point,
        smallest_slab,
    )

    cluster = read_cluster("2x4xH100")
    assert part_of(cluster, 8).devices == 8
    assert part_of(cluster, 2).per_node == 2
    tiny = Workload(lambda: UNet3d(8), (16, 16, 16), 8)
    found = point(tiny, tiny.extents, (4,), cluster)
    assert found["seconds"] >= found["compute"] > 0
    assert others(tiny, found, cluster)["transposed"]["seconds"] == found["seconds"]
    ours = {"domain": [8], "extents": [2048, 2048], "seconds": 1.0, "compute": 0.9, "memory": 1}
    ours["exchange"] = 0.05
    assert smallest_slab([ours]) == ours
    assert smallest_slab([ours | {"exchange": 0.2}]) is None
    beside = others(WORKLOADS["TFNO 2048²"], ours, cluster)
    sent = 16 * 4 * 64 * 2048**2 / 8 * 7 / 8 / LINKS["NDR"].bandwidth  # of 16 transposes
    assert beside["transposed"]["seconds"] == pytest.approx(0.95 + sent, rel=0.01)
    assert beside["whole field"]["seconds"] > beside["transposed"]["seconds"]
