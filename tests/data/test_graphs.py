"""Graphs of torch_geometric as batches: split by nodes and edges."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule

import lightning_shard
from lightning_shard import DomainTensor
from lightning_shard.data.same_batch import check_same_batch
from lightning_shard.data.split import shard_batch
from lightning_shard.trainer.split_summary import split_summary
from tests.parity import mesh_of

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")

from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, SAGEConv, global_mean_pool


def graph(nodes=13, edges=31, seed=0):
    random = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(nodes, 4, generator=random),
        pos=torch.rand(nodes, 2, generator=random),
        edge_index=torch.randint(0, nodes, (2, edges), generator=random),
        edge_attr=torch.randn(edges, 3, generator=random),
        y=torch.randn(1, 2, generator=random),
        name="a graph",
    )


@pytest.mark.spmd(3)
def test_nodes_and_edges_are_split():
    whole = graph()
    found = shard_batch(whole, mesh_of(3))
    assert isinstance(found, Data)
    assert found.name == "a graph"
    assert not any(isinstance(whole[key], DomainTensor) for key in whole.keys())  # noqa: SIM118
    assert str(split_summary(found)) == (
        "split over the domain: edge_attr (dim 0), edge_index (dim 1), pos (dim 0), x (dim 0); "
        "whole: y (float32)"
    )
    for key in ("x", "edge_index", "edge_attr"):
        assert torch.equal(lightning_shard.gather(found[key]), whole[key])
    assert found.num_nodes == 13
    assert found.num_edges == 31


@pytest.mark.spmd(4)
def test_a_batch_of_graphs_on_two_by_two_ranks_among_other_entries():
    batch = Batch.from_data_list([graph(), graph(7, 12)])
    found = shard_batch({"mesh": batch, "t": torch.zeros(2)}, mesh_of(2, 2))
    assert torch.equal(
        found["mesh"].x.to_local(), batch.x.tensor_split(4)[torch.distributed.get_rank()]
    )
    assert found["mesh"].num_graphs == 2
    assert type(found["mesh"].ptr) is torch.Tensor
    mean = global_mean_pool(found["mesh"].x, found["mesh"].batch)
    expected = global_mean_pool(batch.x, batch.batch)
    torch.testing.assert_close(lightning_shard.gather(mean), expected)
    only = shard_batch((batch, 1), mesh_of(2, 2), {"1": None})
    assert type(only[0].x) is torch.Tensor
    named = shard_batch(batch, mesh_of(2, 2), {"x": [0, 0], "edge_index": None})
    assert isinstance(named.x, DomainTensor)
    assert type(named.edge_index) is torch.Tensor
    with pytest.raises(ValueError, match="names the batch entry 'z'"):
        shard_batch(batch, mesh_of(2, 2), {"z": 0})


@pytest.mark.spmd(2)
def test_ranks_that_read_different_graphs():
    check_same_batch(graph(), mesh_of(2))
    with pytest.raises(ValueError, match="read different batches"):
        check_same_batch(graph(seed=torch.distributed.get_rank()), mesh_of(2))


def test_a_graph_along_a_curve():
    whole = graph(200, 900)
    near = torch.cdist(whole.pos, whole.pos).topk(5, largest=False).indices
    whole.edge_index = torch.stack([near.flatten(), torch.arange(200).repeat_interleave(5)])
    whole.edge_attr = torch.arange(1000.0)[:, None]
    found = lightning_shard.ordered_graph(whole, whole.pos)
    count = lightning_shard.crossing_edges
    assert count(found.edge_index, 200, 2) < count(whole.edge_index, 200, 2) / 4
    assert (found.edge_index[1].diff() >= 0).all()
    layer = SAGEConv(4, 3)
    before, after = layer(whole.x, whole.edge_index), layer(found.x, found.edge_index)
    torch.testing.assert_close(before[lightning_shard.curve_order(whole.pos)], after)
    ends = [g.pos[g.edge_index].sum((0, 2)) for g in (whole, found)]
    torch.testing.assert_close(ends[0][found.edge_attr[:, 0].long()], ends[1])


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(4, 8), GCNConv(8, 2)

    def training_step(self, batch, batch_idx):
        x = self.second(self.first(batch.x, batch.edge_index).relu(), batch.edge_index)
        loss = F.mse_loss(global_mean_pool(x, batch.batch, len(batch.y)), batch.y)
        self.log("loss", loss, batch_size=len(batch.y))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.slow
def test_check_and_plan():
    loader = DataLoader([graph(13, 31, seed) for seed in range(4)], 2)
    found = lightning_shard.check(Net(), loader)
    assert found.is_exact, str(found)
    assert "x (dim 0)" in str(found)
    assert "edge_index (dim 1)" in str(found)
    planned = lightning_shard.plan(Net(), loader, 2)
    assert planned.sent_for_fields > 0
    assert "edge_attr (dim 0)" in str(planned)
