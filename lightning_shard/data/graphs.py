"""Graphs as torch_geometric holds them: which of their tensors have a row for each node or edge.

They are known by their methods, so torch_geometric is not imported.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_shard.data.records import as_dicts, map_leaves
from lightning_shard.processes.torch_private.internals import tree_leaves

_METHODS = ("is_node_attr", "is_edge_attr", "__cat_dim__", "keys")


def is_graph(value: Any) -> bool:
    """Say whether it is a `Data` of torch_geometric, or a batch of them."""
    return all(callable(getattr(value, name, None)) for name in _METHODS)


def entries_of(graph: Any) -> dict[str, Any]:
    """What the graph holds, by name; in one order on all ranks."""
    return {key: graph[key] for key in sorted(graph.keys())}


def each_graph(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with each graph in it changed."""
    if not any(map(is_graph, tree_leaves(as_dicts(batch)))):
        return batch
    return map_leaves(lambda leaf: change(leaf) if is_graph(leaf) else leaf, batch)


def with_entries(graph: Any, entries: Mapping[str, Any]) -> Any:
    """A copy of the graph with other values."""
    changed = copy.copy(graph)
    for key, value in entries.items():
        changed[key] = value
    return changed


def split_nodes_and_edges(
    graph: Any, axes: int, split: Callable[[Tensor, tuple[int, ...], str], Any]
) -> Any:
    """Split what has a row for each node or edge, along its rows; all else stays whole.

    Args:
        graph: Whose tensors are whole.
        axes: Those of the domain mesh: all of them split the same dim.
        split: Splits a tensor along dims, one for each axis; its last argument is its name.
    """
    found: dict[str, Any] = {}
    for key, value in entries_of(graph).items():
        if isinstance(value, Tensor) and (graph.is_node_attr(key) or graph.is_edge_attr(key)):
            dim = int(graph.__cat_dim__(key, value)) % value.ndim
            found[key] = split(value, (dim,) * axes, key)
    return with_entries(graph, found)
