"""Graph networks of torch_geometric; nodes and edges are split, edges join nodes of any rank."""

import torch
from torch import nn
from torch_geometric import nn as gnn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

from benchmarks.model_zoo import Apply, Case

NODES, EDGES = 23, 61


def edge_index(nodes=NODES, edges=EDGES, seed=3, others=None):
    """Ends of random edges; the last node has none."""
    random = torch.Generator().manual_seed(seed)
    ends = [torch.randint(0, n - 1, (edges,), generator=random) for n in (nodes, others or nodes)]
    return torch.stack(ends)


def of_edges(layer, *, features=4):
    """A case of a layer that takes nodes and `edge_index`."""
    return Case(
        lambda: Apply(lambda f, x, edges: f(x, edges), layer()), [(NODES, features), edge_index],
        (0,), each=[(0, 0), (1, 1)],
    )  # fmt: skip


def with_features(layer):
    """A case of a layer that takes features of edges, too."""
    return Case(
        lambda: Apply(lambda f, x, edges, e: f(x, edges, e), layer()),
        [(NODES, 4), edge_index, (EDGES, 3)], (0,), each=[(0, 0), (1, 1), (0, 0)],
    )  # fmt: skip


def mlp(inputs, width=8, outputs=None):
    layers = [nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs or width)]
    return nn.Sequential(*layers, *([] if outputs else [nn.LayerNorm(width)]))


class MeshGraphBlock(MessagePassing):
    """Update edges from both ends, then nodes from the sum of their edges: Pfaff et al. 2021."""

    def __init__(self, width=8):
        super().__init__(aggr="add")
        self.edges, self.nodes = mlp(3 * width), mlp(2 * width)

    def forward(self, x, edge_index, e):
        size = x.size(0), x.size(0)
        e = e + self.edge_updater(edge_index, x=x, e=e)
        return x + self.nodes(torch.cat([x, self.propagate(edge_index, e=e, size=size)], -1)), e

    def edge_update(self, x_i, x_j, e):
        return self.edges(torch.cat([x_i, x_j, e], -1))

    def message(self, e):
        return e


class MeshGraphNet(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.encode_nodes, self.encode_edges = mlp(4), mlp(3)
        self.blocks = nn.ModuleList(MeshGraphBlock() for _ in range(blocks))
        self.decode = mlp(8, outputs=2)

    def forward(self, x, edge_index, e):
        x, e = self.encode_nodes(x), self.encode_edges(e)
        for block in self.blocks:
            x, e = block(x, edge_index, e)
        return self.decode(x)


class Bipartite(nn.Module):
    """From the nodes of a grid to those of a mesh, or back, by edges with features."""

    def __init__(self, width=8):
        super().__init__()
        self.edges, self.nodes = mlp(3 * width), mlp(2 * width)

    def forward(self, sources, targets, ends, e):
        message = self.edges(torch.cat([sources[ends[0]], targets[ends[1]], e], -1))
        total = scatter(message, ends[1], dim=0, dim_size=targets.size(0), reduce="sum")
        return targets + self.nodes(torch.cat([targets, total], -1))


class GraphCastLike(nn.Module):
    """Encode a grid on a mesh, process on the mesh, decode to the grid: Lam et al. 2023."""

    def __init__(self, blocks=2):
        super().__init__()
        self.grid, self.mesh = mlp(4), mlp(3)
        self.features = nn.ModuleList(mlp(3) for _ in range(3))
        self.encode, self.decode = Bipartite(), Bipartite()
        self.blocks = nn.ModuleList(MeshGraphBlock() for _ in range(blocks))
        self.out = mlp(8, outputs=4)

    def forward(self, grid, mesh, up, inside, down, *features):
        x, m = self.grid(grid), self.mesh(mesh)
        e = [f(own) for f, own in zip(self.features, features, strict=True)]
        m = self.encode(x, m, up, e[0])
        edges = e[1]
        for block in self.blocks:
            m, edges = block(m, inside, edges)
        return grid + self.out(self.decode(m, x, down, e[2]))


class GraphClassifier(nn.Module):
    """Several graphs in one batch: a layer, a norm over nodes, the mean of each graph."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = gnn.GraphConv(4, 8), gnn.BatchNorm(8)
        self.out = nn.Linear(16, 3)

    def forward(self, x, edges, batch):
        x = self.norm(self.conv(x, edges)).relu()
        mean, most = gnn.global_mean_pool(x, batch, 3), gnn.global_max_pool(x, batch, 3)
        return self.out(torch.cat([mean, most], -1))


class Reductions(nn.Module):
    """Every reduction of torch_geometric's `scatter`, and its softmax by receiver."""

    def forward(self, messages, receivers):
        kinds = ["sum", "mean", "min", "max", "mul"]
        found = [scatter(messages, receivers, 0, 9, kind) for kind in kinds]
        return *found, softmax(messages, receivers, num_nodes=9)


CASES = {
    "gcn": of_edges(lambda: gnn.GCNConv(4, 8)),
    "sage": of_edges(lambda: gnn.SAGEConv(4, 8)),
    "sage_max": of_edges(lambda: gnn.SAGEConv(4, 8, aggr="max")),
    "gat": of_edges(lambda: gnn.GATConv(4, 4, heads=2)),
    "gat_v2": with_features(lambda: gnn.GATv2Conv(4, 4, heads=2, edge_dim=3)),
    "gin": of_edges(lambda: gnn.GINConv(mlp(4))),
    "gine": with_features(lambda: gnn.GINEConv(mlp(4), edge_dim=3)),
    "transformer": with_features(lambda: gnn.TransformerConv(4, 4, heads=2, edge_dim=3)),
    "cheb": of_edges(lambda: gnn.ChebConv(4, 8, K=3)),
    "gen": with_features(lambda: gnn.GENConv(4, 8, edge_dim=3)),
    "nn_conv": with_features(lambda: gnn.NNConv(4, 4, mlp(3, outputs=16))),
    "pna": of_edges(lambda: gnn.PNAConv(4, 8, ["mean", "max", "std"], ["identity", "amplification"],
        torch.tensor([1, 4, 9, 4]))),
    "graph_unet": of_edges(lambda: gnn.GraphUNet(4, 8, 2, depth=2)),
    "reductions": Case(Reductions, [(41, 3), lambda: edge_index(10, 41)[0]], (0,),
        each=[(0, 0), (0, 0)]),
    "graphs": Case(GraphClassifier, [(NODES, 4), edge_index, lambda: torch.arange(NODES) // 8],
        (0,), each=[(0, 0), (1, 1), (0, 0)]),
    "mesh_graph_net": Case(MeshGraphNet, [(NODES, 4), edge_index, (EDGES, 3)], (0,),
        each=[(0, 0), (1, 1), (0, 0)]),
    "graph_cast": Case(GraphCastLike, [(NODES, 4), (11, 3), lambda: edge_index(NODES, 31, 1, 11),
        lambda: edge_index(11, 25, 2), lambda: edge_index(11, 37, 4, NODES), (31, 3), (25, 3),
        (37, 3)], (0,), each=[(0, 0), (0, 0), (1, 1), (1, 1), (1, 1), (0, 0), (0, 0), (0, 0)]),
}  # fmt: skip
