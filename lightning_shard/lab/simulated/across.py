"""Computes a collective whose ranks are in several processes, of which each has some in turns.

Reductions are computed within each process first, so that one tensor crosses between processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.lab.simulated import collectives
from lightning_shard.processes.torch_private.internals import tree_map_only

Parts = dict[int, Any]  # what the ranks of this process bring, by their places in the group

# which gloo does not reduce, and what it does in their place
_REDUCED_AS = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.bool: torch.int32}


@dataclass(frozen=True)
class Processes:
    """The processes of a group.

    Attributes:
        own: The number of this process.
        of: The process of each place of the group.
    """

    own: int
    of: list[int]

    @property
    def are_all(self) -> bool:
        """True if each process has ranks of the group."""
        return len({*self.of}) == dist.get_world_size()

    def places(self, process: int) -> list[int]:
        """Return the places whose ranks are in a process."""
        return [place for place, other in enumerate(self.of) if other == process]


def compute_across(
    processes: Processes, parts: Parts, compute: Callable[[list[Any]], None] | None
) -> None:
    """Compute a collective; all processes call it, also those that have no rank of the group.

    Args:
        processes: The processes of the group.
        parts: Tensors that the ranks of this process bring; results are written into them.
        compute: The function that computes it where all ranks are of one process; None on a process
            without ranks of the group.
    """
    if compute is None or not processes.are_all:
        _by_all(processes, parts, compute)
        return
    function, options = compute, {}
    if isinstance(compute, partial):
        function, options = compute.func, compute.keywords
    _WAYS.get(function, _by_all)(processes, parts, compute, **options)


def _by_all(processes: Processes, parts: Parts, compute: Any, **_: Any) -> None:
    """Give each process all that is brought."""
    found: list[Any] = [None] * dist.get_world_size()
    sent = tree_map_only(Tensor, lambda x: x.detach().clone(), parts)  # no more than it
    dist.all_gather_object(found, sent)
    if compute is not None:
        brought = {place: data for other in found for place, data in other.items()} | parts
        compute([brought[place] for place in range(len(brought))])


def _all_reduce(processes: Processes, parts: Parts, _: Any, op: Any) -> None:
    for same in zip(*parts.values(), strict=True):
        total = _total(list(same), op, len(processes.of))
        for tensor in same:
            tensor.copy_(total)


def _reduce_to(processes: Processes, parts: Parts, _: Any, op: Any, root: int) -> None:
    for number in range(len(next(iter(parts.values())))):
        total = _total([tensors[number] for tensors in parts.values()], op, len(processes.of))
        if root in parts:
            parts[root][number].copy_(total)


def _reduce_scatter(processes: Processes, parts: Parts, _: Any, op: Any) -> None:
    for place in range(len(processes.of)):
        given = [brought[0][place] for brought in parts.values()]
        total = _total(given, op, len(processes.of))
        if place in parts:
            collectives.put(total, parts[place][1])


def _reduce_scatter_single(processes: Processes, parts: Parts, _: Any, op: Any) -> None:
    total = _total([whole for whole, _ in parts.values()], op, len(processes.of))
    for place, part in enumerate(total.view(-1).chunk(len(processes.of))):
        if place in parts:
            collectives.put(part, parts[place][1])


def _all_gather(processes: Processes, parts: Parts, _: Any) -> None:
    """Let each process in turn send what its ranks bring."""
    places_of_one = next(iter(parts.values()))[1]
    for process in range(dist.get_world_size()):
        numbers = processes.places(process)
        own = [parts[n][0] for n in numbers] if process == processes.own else None
        like = [places_of_one[n] for n in numbers]
        for number, part in zip(numbers, _sent(process, own, like), strict=True):
            for _, places in parts.values():
                collectives.put(part, places[number])


def _all_gather_single(processes: Processes, parts: Parts, compute: Any) -> None:
    count = len(processes.of)
    chunks = {n: (part, list(whole.view(-1).chunk(count))) for n, (part, whole) in parts.items()}
    _all_gather(processes, chunks, compute)


def _broadcast(processes: Processes, parts: Parts, _: Any, root: int) -> None:
    like = next(iter(parts.values()))
    found = _sent(processes.of[root], parts.get(root), like)
    for place, tensors in parts.items():
        for tensor, source in zip(tensors, found, strict=True):
            if place != root:
                tensor.copy_(source.view_as(tensor))


def _barrier(*_: Any) -> None:
    """Do nothing: the processes have met."""


def _total(parts: list[Tensor], op: Any, ranks: int) -> Tensor:
    """Reduce the tensors of the ranks of this process, and then over the processes."""
    averages = op == dist.ReduceOp.AVG
    op = dist.ReduceOp(dist.ReduceOp.SUM) if averages else op
    total = collectives.reduced(parts, op).contiguous()
    wide = total.to(_REDUCED_AS.get(total.dtype, total.dtype))
    dist.all_reduce(torch.view_as_real(wide) if wide.is_complex() else wide, op)
    total = wide.to(total.dtype)
    return total / ranks if averages else total


def _sent(process: int, own: Sequence[Tensor] | None, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that a process sends to all.

    Args:
        process: The one that sends.
        own: Its tensors; None on the others.
        like: Tensors of their sizes and types.
    """
    counts = [x.nbytes for x in like]
    if own is None:
        packed = torch.empty(sum(counts), dtype=torch.uint8)
    else:
        packed = torch.cat([_bytes(x) for x in own]) if own else torch.empty(0, dtype=torch.uint8)
        if [x.nbytes for x in own] != counts:
            raise RuntimeError("the ranks bring tensors of other sizes")
    dist.broadcast(packed, process)
    parts = packed.split(counts)
    return [part.clone().view(x.dtype).view(x.shape) for part, x in zip(parts, like, strict=True)]


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


_WAYS: dict[Any, Callable[..., None]] = {
    collectives.all_reduce: _all_reduce,
    collectives.reduce_to: _reduce_to,
    collectives.reduce_scatter: _reduce_scatter,
    collectives.reduce_scatter_single: _reduce_scatter_single,
    collectives.all_gather: _all_gather,
    collectives.all_gather_single: _all_gather_single,
    collectives.broadcast: _broadcast,
    collectives.nothing: _barrier,
}
