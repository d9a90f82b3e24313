"""Orders points along a curve that fills space, so that neighbours are mostly on one rank.

A domain gives each rank rows that follow each other. In an order in which neighbours stand close
together, few edges join nodes of two ranks; how many do, `crossing_edges` counts.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_shard.data.tree import entries_of, with_entries
from lightning_shard.domain.layout import partition
from lightning_shard.processes.arguments import is_whole


def curve_order(points: Tensor) -> Tensor:
    """Order points (N, D) along a Hilbert curve: `points[curve_order(points)]`.

    Points in one cell of the curve's finest grid keep their order.
    """
    count, dims = points.shape
    if not count or not dims:
        return torch.arange(count, device=points.device)
    bits = 62 // dims if dims > 2 else 20
    low, high = points.amin(0), points.amax(0)
    share = (points - low).double() / (high - low).double().clamp(min=1e-300)
    cells = (share * (2**bits - 1)).round().long().clamp(0, 2**bits - 1)
    return _place_on_curve([*cells.unbind(1)], bits).argsort(stable=True)


def _place_on_curve(cells: list[Tensor], bits: int) -> Tensor:
    """The number of each cell on the curve, by Skilling's exchanges and inversions of bits."""
    for bit in reversed(range(1, bits)):
        below = 2**bit - 1
        for d in range(len(cells)):
            is_set = cells[d] >> bit & 1 == 1
            other = (cells[0] ^ cells[d]) & below
            cells[d] = torch.where(is_set, cells[d], cells[d] ^ other)
            cells[0] = torch.where(is_set, cells[0] ^ below, cells[0] ^ other)
    for d in range(1, len(cells)):
        cells[d] = cells[d] ^ cells[d - 1]
    turned = torch.zeros_like(cells[0])
    for bit in reversed(range(1, bits)):
        turned = torch.where(cells[-1] >> bit & 1 == 1, turned ^ (2**bit - 1), turned)
    place = torch.zeros_like(turned)
    for bit in reversed(range(bits)):
        for cell in cells:
            place = place << 1 | (cell ^ turned) >> bit & 1
    return place


def crossing_edges(edge_index: Tensor, nodes: int, ranks: int) -> int:
    """Count the edges (2, E) that join nodes of two ranks, when `ranks` share the nodes.

    Raises:
        ValueError: There are no ranks, or an edge has a node that is not among `nodes`.
    """
    if not is_whole(ranks):
        raise ValueError(f"ranks must be a whole number from 1 on; got {ranks!r}.")
    highest = int(edge_index.max()) if edge_index.numel() else -1
    if not is_whole(nodes, highest + 1):
        raise ValueError(
            f"nodes must be their whole number, more than {highest}, the highest in edge_index; "
            f"got {nodes!r}."
        )
    offsets = torch.tensor(partition(nodes, ranks)[1:], device=edge_index.device)
    owners = torch.bucketize(edge_index, offsets, right=True)
    return int((owners[0] != owners[1]).sum())


def ordered_graph(graph: Any, points: Tensor) -> Any:
    """Order the nodes of a graph of torch_geometric along a curve, and its edges by receiver.

    Args:
        graph: A `Data`; its `edge_index` and all that has a row for each node or edge is reordered.
        points: Where its nodes lie, (nodes, D).

    Returns:
        A copy. Numbers of nodes in other entries than `edge_index` stay as they are.
    """
    order = curve_order(points)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    ends = place[graph.edge_index]
    edges = ends[1].argsort(stable=True)
    found: dict[str, Any] = {"edge_index": ends[:, edges]}
    for key, value in (entries_of(graph) or {}).items():
        if key == "edge_index" or not isinstance(value, Tensor):
            continue
        for has_rows, rows in ((graph.is_node_attr, order), (graph.is_edge_attr, edges)):
            if has_rows(key):
                found[key] = value.index_select(int(graph.__cat_dim__(key, value)), rows)
                break
    return with_entries(graph, found)
