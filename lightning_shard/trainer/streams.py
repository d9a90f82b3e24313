"""Ends an epoch on all ranks at once, though their streams of batches have other lengths.

Each training and evaluation step is a collective operation, so a rank whose stream has ended while
others go on would leave them waiting. Training ends with the batch that the shortest stream had
last. Evaluation goes on to the longest: a rank without a batch takes part in the collectives only
(uneven_evaluation.py). Before each batch the ranks agree who has one; a loader whose length is
known is compared once, before it is read.

In a loop of Fabric a rank may read alone, or leave the loop before the end. There the ranks compare
at the end of a pass in which they have communicated.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_shard.fsdp.same_blocks import orders
from lightning_shard.lightning import rank_zero_info


@dataclass(frozen=True)
class UnevenBatch:
    """A batch of a step for which some ranks have none.

    Attributes:
        batch: The batch of this rank; None where it has none.
        present: True for a rank that has a batch, by rank.
    """

    batch: Any
    present: tuple[bool, ...]


def end_together(loader: DataLoader[Any], device: torch.device) -> None:
    """Let `loader` end on all ranks at once, in place, with the shortest.

    Raises:
        ValueError: Its length is known, and differs between ranks.
    """
    end_alone(loader)
    lengths = _lengths(loader)
    if None in lengths:
        _replace(loader, lambda batches: _to_the_shortest(batches, device))
    elif len(set(lengths)) > 1:
        raise ValueError(
            f"the ranks' dataloaders have different numbers of batches, {lengths}, but every step "
            "needs all ranks; give each the same batch_size, and as many samples: "
            "torch.utils.data.Subset(dataset, range(number)) has the first ones."
        )


def end_with_the_longest(
    loader: DataLoader[Any], device: torch.device, replicas: Sequence[int]
) -> None:
    """Let `loader` yield as many batches on all ranks as on any, in place.

    Where some ranks have a batch and others have none, each yields an `UnevenBatch`.

    Args:
        loader: A loader of this rank's samples.
        device: The device of this rank's collectives.
        replicas: The data replica of each rank. Ranks of one replica read the same samples.

    Raises:
        ValueError: Its length is known, and differs between ranks that share samples.
    """
    end_alone(loader)
    known = _lengths(loader)
    if None in known:
        _replace(loader, lambda batches: _to_the_longest(batches, device, replicas))
    elif len(set(known)) > 1:
        lengths = [int(n or 0) for n in known]
        if len(set(zip(replicas, lengths, strict=True))) > len(set(replicas)):
            raise ValueError(
                f"the ranks' dataloaders have different numbers of batches, {lengths}, but ranks "
                "of one domain read the same samples; trainer.distributed_sampler_kwargs says "
                "which replica reads what."
            )
        _replace(loader, lambda batches: _filled(batches, lengths), length=max(lengths))


def compared_at_end(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches, at whose end all ranks that have run blocks together since must be.

    Else the steps of one epoch on one rank would be paired with those of the next on another.

    Raises:
        DisagreementError: Another rank has a further batch.
    """
    before, read = [(order, order.count) for order in orders()], 0
    for batch in batches:
        yield batch
        read += 1
    if threading.current_thread() is threading.main_thread():  # else it may read ahead
        for order, count in before:
            if order.count > count:
                order.ends_batches(read)


def count_as_the_longest(loader: DataLoader[Any]) -> None:
    """Let `len(loader)` be the largest of all ranks, of which limits of batches take a fraction."""
    end_alone(loader)
    lengths = _lengths(loader)
    if None not in lengths and len(set(lengths)) > 1:
        _replace(loader, iter, length=max(int(n or 0) for n in lengths))


def end_alone(loader: DataLoader[Any]) -> None:
    """Take back what this module has done to a loader."""
    loader.__class__ = getattr(loader, "alone", type(loader))


def _replace(
    loader: DataLoader[Any],
    change: Callable[[Iterator[Any]], Iterator[Any]],
    *,
    length: int | None = None,
) -> None:
    # Python looks for __iter__ and __len__ in the class; another object would not be the one that
    # the Trainer and the user's hooks hold (tests/trainer/test_streams.py)
    cls = type(loader)

    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        return change(cls.__iter__(self))

    methods: dict[str, Any] = {"__iter__": iterate, "alone": cls}
    if length is not None:
        methods["__len__"] = lambda self: length
    loader.__class__ = type(cls.__name__, (cls,), methods)


def length_of(loader: DataLoader[Any]) -> int | None:
    """Return the number of batches; None if it is not known before they are read."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _lengths(loader: DataLoader[Any]) -> list[int | None]:
    """Return the number of batches on each rank; None where it is not known."""
    length = length_of(loader)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [0]
    lengths: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, length)
    return lengths


def _to_the_shortest(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches as long as no rank's have ended."""
    for number in count():
        batch = next(batches, None)
        have = _who_has(batch, device)
        if not all(have):
            if any(have):
                rank_zero_info(
                    f"The streams of {have.count(False)} ranks end after {number} batches; what "
                    "the others have left is not in this epoch."
                )
            return
        yield batch


def _to_the_longest(
    batches: Iterator[Any], device: torch.device, replicas: Sequence[int]
) -> Iterator[Any]:
    """Yield batches until those of all replicas have ended."""
    while True:
        batch = next(batches, None)
        have = _who_has(batch, device)
        ended = {replica for replica, has in zip(replicas, have, strict=True) if not has}
        present = tuple(replica not in ended for replica in replicas)
        if not any(present):
            return
        mine = batch if present[dist.get_rank()] else None
        yield mine if all(present) else UnevenBatch(mine, present)


def _who_has(batch: Any, device: torch.device) -> list[bool]:
    here = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
    here[dist.get_rank()] = batch is not None
    dist.all_reduce(here)
    return [bool(x) for x in here.tolist()]


def _filled(batches: Iterator[Any], lengths: Sequence[int]) -> Iterator[Any]:
    """Yield as many batches as the longest of all ranks has."""
    for number in range(max(lengths)):
        present = tuple(number < length for length in lengths)
        batch = next(batches) if present[dist.get_rank()] else None
        yield batch if all(present) else UnevenBatch(batch, present)
