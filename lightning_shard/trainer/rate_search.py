"""Lets the search of a learning rate see the loss of all data replicas, as one process does."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.lightning import LRCallback, Trainer
from lightning_shard.trainer.host import callbacks_of


def follow_search(trainer: Trainer, device: torch.device) -> None:
    """Let a search that begins decide by the mean over all ranks; Lightning takes rank 0's."""
    for callback in callbacks_of(trainer)[:1]:
        if isinstance(callback, LRCallback) and "on_train_batch_end" not in vars(callback):
            plain = callback.on_train_batch_end

            def ends(trainer: Any, module: Any, outputs: Any, *batch: Any, plain: Any = plain):
                plain(trainer, module, _mean_of_ranks(outputs, device), *batch)

            vars(callback)["on_train_batch_end"] = ends


def _mean_of_ranks(outputs: Any, device: torch.device) -> Any:
    """Return what a step returned, with the mean of the losses of the ranks that have one."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    is_there = isinstance(loss, Tensor)
    own = float(loss) if is_there else 0.0
    total = torch.tensor([own, is_there], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    if not is_there:
        return outputs
    mean = total[0] / total[1]
    return {**outputs, "loss": mean} if isinstance(outputs, Mapping) else mean
