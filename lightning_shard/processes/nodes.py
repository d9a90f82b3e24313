"""Finds which ranks are on one node, and so near to each other."""

import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.processes.process_info import launcher, process_info
from lightning_shard.processes.torch_private.typed import integers


def own_node() -> str:
    """Name the node of this process."""
    return f"{socket.gethostname()}/{process_info().node if launcher().tells_nodes else 0}"


def nodes_of_ranks() -> list[str]:
    """Find the node of each rank. All ranks must call it."""
    nodes = [""] * dist.get_world_size()
    dist.all_gather_object(nodes, own_node())
    return nodes


def nearest_first(nodes: Sequence[str], sizes: Sequence[int]) -> Tensor:
    """Arrange the ranks in the shape `sizes`, with the last axes within nodes where they can be.

    Along each axis they ascend, as in process groups, which order their ranks. Where that and the
    nodes exclude each other, the ranks stand in their own order.

    Args:
        nodes: Of each rank.
        sizes: Of the mesh; their product is the number of ranks.
    """
    own = torch.arange(len(nodes)).reshape(*sizes)
    if not _crossing(own.reshape(sizes[0], -1), nodes):
        return own
    first = {node: nodes.index(node) for node in nodes}
    order = sorted(range(len(nodes)), key=lambda rank: (first[nodes[rank]], rank))
    near = _ascending(order, sizes)
    return near if all((near.diff(dim=d) > 0).all() for d in range(near.ndim)) else own


def _ascending(ranks: list[int], sizes: Sequence[int]) -> Tensor:
    """`ranks` in blocks, each in its order."""
    if len(sizes) == 1:
        return torch.tensor(sorted(ranks))
    block = len(ranks) // sizes[0]
    parts = [
        _ascending(ranks[start : start + block], sizes[1:]) for start in range(0, len(ranks), block)
    ]
    return torch.stack(sorted(parts, key=lambda part: int(part.flatten()[0])))


def _crossing(groups: Tensor, nodes: Sequence[str]) -> list[list[int]]:
    """The groups of ranks (groups, ranks) that are on several nodes."""
    return [group for group in map(integers, groups) if len({nodes[rank] for rank in group}) > 1]


def why_crossing(ranks: Tensor, nodes: Sequence[str]) -> str | None:
    """Say why groups of `ranks` (groups, ranks) are on several nodes; None: none is."""
    crossing = _crossing(ranks, nodes)
    if not crossing:
        return None
    size = ranks.shape[-1]
    counts = sorted({nodes.count(node) for node in set(nodes)})
    if size > counts[-1]:
        reason = f"a node has {counts[-1]} processes"
    elif any(count % size for count in counts):
        reason = f"it does not divide the {' or '.join(map(str, counts))} processes of each node"
    else:
        reason = "the launcher has numbered the ranks across nodes; let it fill one after the other"
    return (
        f"a domain of {size} processes is on several nodes (ranks {crossing[0]} on "
        f"{', '.join(sorted({nodes[rank] for rank in crossing[0]}))}), because {reason}: halos and "
        "Fourier modes travel between nodes in each layer."
    )
