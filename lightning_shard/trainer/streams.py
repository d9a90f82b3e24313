"""Ends an epoch on all ranks with the batch that the shortest stream had last.

Each training and evaluation step is a collective operation, so a rank whose stream has ended while
others go on would leave them waiting. Before each batch the ranks agree that all have one. A loader
whose length is known is compared once, before it is read.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader


def end_together(loader: DataLoader[Any], device: torch.device) -> None:
    """Let `loader` end on all ranks at once, in place.

    Raises:
        ValueError: Its length is known, and differs between ranks.
    """
    end_alone(loader)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    lengths: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, _length(loader))
    if None in lengths:
        cls = type(loader)

        def agreeing(self: DataLoader[Any]) -> Iterator[Any]:
            return _agreed(cls.__iter__(self), device)

        together = {"__iter__": agreeing, "alone": cls}
        loader.__class__ = type(cls.__name__, (cls,), together)
    elif len(set(lengths)) > 1:
        raise ValueError(
            f"the ranks' dataloaders have different numbers of batches, {lengths}, but every step "
            "needs all ranks; let the sampler give each rank the same number (drop_last=True)."
        )


def end_alone(loader: DataLoader[Any]) -> None:
    """Take back `end_together`: predictions are made for all that a rank reads."""
    loader.__class__ = getattr(loader, "alone", type(loader))


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _agreed(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """`batches` as long as no rank's have ended."""
    count = 0
    while True:
        batch = next(batches, None)
        here = torch.tensor([batch is not None, batch is None], device=device).int()
        dist.all_reduce(here)
        if here[1]:
            if here[0]:
                rank_zero_info(
                    f"The streams of {int(here[1])} ranks end after {count} batches; what the "
                    "others have left is not in this epoch."
                )
            return
        count += 1
        yield batch
