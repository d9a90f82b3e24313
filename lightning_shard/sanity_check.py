"""Lightning's sanity check and learning-rate finder leave no trace in a device's random numbers.

Lightning 2.6 runs both with its `isolate_rng`, which keeps the numbers of the CPU and of CUDA only.
"""

import functools
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_shard.random_state import random_state, set_random_state


class IsolatedSanityCheck(Strategy):
    """The generators draw after the sanity check what they would have drawn without it."""

    _before_check: dict[str, Any] | None = None

    @override
    def on_validation_start(self) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.sanity_checking:
            self._before_check = random_state(self.root_device)

    @override
    def on_validation_end(self) -> None:
        if self._before_check is not None:
            set_random_state(self._before_check, self.root_device)
            self._before_check = None


def isolate_learning_rate_finders(trainer: Trainer, device: torch.device) -> None:
    """The same for the callbacks that try learning rates, once for each of them."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if isinstance(callback, LearningRateFinder) and "lr_find" not in vars(callback):
            vars(callback)["lr_find"] = functools.partial(_isolated, callback.lr_find, device)


def _isolated(find: Any, device: torch.device, *args: Any) -> None:
    before = random_state(device)
    try:
        find(*args)
    finally:
        set_random_state(before, device)
