"""Graph networks of torch_geometric, on split nodes and split edges."""

from unittest import mock

import pytest

from tests.models.check import check

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")


@pytest.mark.quick_rows("sage", "reductions")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "pna", "reductions", "graphs"])
def test_two_ranks(name):
    check("torch_geometric", name, 2)


@pytest.mark.quick_rows("transformer")
@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", ["gat_v2", "transformer", "mesh_graph_net", "graph_cast"])
def test_three_ranks(name):
    check("torch_geometric", name, 3)


@pytest.mark.quick_rows("gine", "sage_max")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", ["gine", "sage_max", "mesh_graph_net", "graph_cast"])
def test_nodes_over_two_by_two_ranks(name):
    check("torch_geometric", name, 2, 2)


@pytest.mark.quick_rows("gat", "graphs", "mesh_graph_net")
@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", ["gcn", "gat", "pna", "graphs", "mesh_graph_net", "graph_cast"])
def test_sums_of_messages_stay_split_where_nodes_are_many(name):
    with mock.patch("lightning_shard.ops.become.LARGE", 4):
        check("torch_geometric", name, 3)
