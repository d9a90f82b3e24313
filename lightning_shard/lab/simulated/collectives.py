"""Computes what a collective gives all ranks of a group, from what each of them brings.

Each function is given a list with one entry for each rank, and writes into the ranks' own tensors.
Sums are taken in the order of the ranks, so they are the same in every run.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}

Pair = tuple[Tensor, Tensor]  # one that goes, and the place for one that comes


def reduced(parts: Sequence[Tensor], op: Any) -> Tensor:
    """Return the sum, mean, product or another reduction of tensors of one size.

    Raises:
        NotImplementedError: The reduction is not simulated.
        RuntimeError: The tensors have other sizes.
    """
    _same_sizes(parts)
    kind = op.op if isinstance(op, dist.ReduceOp) else op
    if kind not in _REDUCTIONS:
        raise NotImplementedError(f"the reduction {kind} is not simulated")
    total = reduce(_REDUCTIONS[kind], parts)
    if kind == dist.ReduceOp.AVG:
        total = total / len(parts)
    return total.clone() if len(parts) == 1 else total


def all_reduce(tensors: list[list[Tensor]], op: Any) -> None:
    """Write the reduction of the ranks' n-th tensors into each of them."""
    for same in zip(*tensors, strict=True):
        total = reduced(same, op)
        for tensor in same:
            tensor.copy_(total)


def reduce_to(tensors: list[list[Tensor]], op: Any, root: int) -> None:
    """Write the reduction of the ranks' n-th tensors into that of one rank."""
    for same in zip(*tensors, strict=True):
        same[root].copy_(reduced(same, op))


def broadcast(tensors: list[list[Tensor]], root: int) -> None:
    """Copy the n-th tensor of one rank into those of the others."""
    for same in zip(*tensors, strict=True):
        _same_sizes(same)
        for tensor in same:
            if tensor is not same[root]:
                tensor.copy_(same[root].view_as(tensor))


def all_gather(pairs: list[tuple[Tensor, list[Tensor]]]) -> None:
    """Copy each rank's tensor into every rank's list."""
    for rank, (part, _) in enumerate(pairs):
        for _, places in pairs:
            put(part, places[rank])


def all_gather_single(pairs: list[Pair]) -> None:
    """Copy the ranks' tensors, one behind the other, into every rank's whole tensor."""
    all_gather([(part, list(_flat(place).chunk(len(pairs)))) for part, place in pairs])


def reduce_scatter(pairs: list[tuple[list[Tensor], Tensor]], op: Any) -> None:
    """Write the reduction of the ranks' n-th tensors to rank n."""
    totals = [reduced([parts[rank] for parts, _ in pairs], op) for rank in range(len(pairs))]
    for (_, place), total in zip(pairs, totals, strict=True):
        put(total, place)


def reduce_scatter_single(pairs: list[Pair], op: Any) -> None:
    """Reduce the ranks' whole tensors, and write the n-th part to rank n."""
    reduce_scatter([(list(_flat(whole).chunk(len(pairs))), place) for whole, place in pairs], op)


def all_to_all(pairs: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    """Copy the n-th tensor of each rank to rank n."""
    for rank, (parts, _) in enumerate(pairs):
        for peer, part in enumerate(parts):
            if part.numel() != (wanted := pairs[peer][1][rank].numel()):
                raise RuntimeError(
                    f"rank {rank} of the group sends {part.numel()} elements to rank {peer}, which "
                    f"receives {wanted}"
                )
            put(part, pairs[peer][1][rank])


def all_to_all_single(pairs: list[tuple[Tensor, Tensor, list[int], list[int]]]) -> None:
    """Copy the n-th rows of each rank to rank n; the lists are how many rows go and come."""
    ranks = len(pairs)
    all_to_all([
        (_rows(source, given, ranks), _rows(place, sizes, ranks))
        for source, place, given, sizes in pairs
    ])  # fmt: skip


def scatter(pairs: list[tuple[list[Tensor], Tensor]], root: int) -> None:
    """Copy the n-th tensor of one rank to rank n."""
    for part, (_, place) in zip(pairs[root][0], pairs, strict=True):
        put(part, place)


def gather(pairs: list[tuple[Tensor, list[Tensor]]], root: int) -> None:
    """Copy each rank's tensor into the list of one rank."""
    for (part, _), place in zip(pairs, pairs[root][1], strict=True):
        put(part, place)


def nothing(_: list[Any]) -> None:
    """Combine nothing: a barrier has no values."""


def _rows(x: Tensor, sizes: list[int], ranks: int) -> list[Tensor]:
    return list(x.split_with_sizes(sizes) if sizes else x.split(len(x) // ranks))


def _flat(x: Tensor) -> Tensor:
    return x.view(-1)


def put(source: Tensor, place: Tensor) -> None:
    """Copy what a rank brings to where another one gets it."""
    if source.numel() != place.numel():
        raise RuntimeError(
            f"{source.numel()} elements come where {place.numel()} are received; the ranks bring "
            "tensors of other sizes"
        )
    place.copy_(source.reshape(place.shape))


def _same_sizes(tensors: Sequence[Tensor]) -> None:
    if len({tensor.numel() for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise RuntimeError(f"the ranks bring tensors of other sizes: {shapes}")
