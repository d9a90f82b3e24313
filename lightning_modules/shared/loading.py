"""Makes the data loader of every data module, so that their workers and memory are set alike."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool = False,
    num_workers: int = 0,
    pin_memory: bool = True,
    prefetch_factor: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[Any]:
    """Make a loader whose workers stay between epochs, and whose batches are pinned for a device.

    Args:
        dataset: The samples.
        batch_size: Samples of a batch.
        shuffle: True draws the samples of each epoch in another order.
        num_workers: Processes that load batches; 0 loads them in the training process.
        pin_memory: True puts batches into page-locked memory, from which an accelerator copies
            faster. Without an accelerator nothing is pinned, and torch has nothing to warn of.
        prefetch_factor: Batches that each worker reads ahead; by default torch's 2.
        collate_fn: Makes a batch of a list of samples; by default torch's.
    """
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory and torch.accelerator.is_available(),
        prefetch_factor=prefetch_factor if num_workers else None,
        collate_fn=collate_fn,
    )
