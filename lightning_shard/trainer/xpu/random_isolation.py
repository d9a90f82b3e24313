"""Lightning's sanity check and learning-rate finder leave no trace in a device's random numbers.

Lightning 2.6 runs both with its `isolate_rng`, which keeps the numbers of the CPU and of CUDA only.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from lightning_shard.lightning import Callback, LearningRateFinder, LightningModule, Trainer
from lightning_shard.trainer.host import add_once, callbacks_of
from lightning_shard.trainer.random_state import random_state, set_random_state


class IsolatedSanityCheck(Callback):
    """Sets the device's generator after the sanity check as it was before."""

    def __init__(self) -> None:
        """Begin before a sanity check."""
        self._before: dict[str, Any] = {}

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the random numbers."""
        self._before = random_state(trainer.strategy.root_device)

    @override
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the random numbers back."""
        set_random_state(self._before, trainer.strategy.root_device)


def isolate_random_numbers(trainer: Trainer, device: torch.device) -> None:
    """Isolate the sanity check, and the callbacks that try learning rates, once for each trainer.

    Args:
        trainer: Gets one more callback, and its learning-rate finders change.
        device: The device whose generator is kept, beside the CPU's.
    """
    add_once(trainer, IsolatedSanityCheck(), first=True)
    for callback in callbacks_of(trainer):
        if isinstance(callback, LearningRateFinder) and "lr_find" not in vars(callback):
            vars(callback)["lr_find"] = functools.partial(_isolated, callback.lr_find, device)


def _isolated(find: Callable[..., None], device: torch.device, *args: Any) -> None:
    before = random_state(device)
    try:
        find(*args)
    finally:
        set_random_state(before, device)
