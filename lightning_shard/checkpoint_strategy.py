"""Checkpoints: what a strategy gathers, writes and reads back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.checkpoint import (
    full,
    full_module_state,
    full_optimizer_state,
    load_optimizer_state,
)
from lightning_shard.mesh_strategy import MeshStrategy


class CheckpointStrategy(MeshStrategy):
    """Ordinary Lightning checkpoints of sharded modules and optimizers."""

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return {} if self._cut_off() else full_module_state(self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        assert self.lightning_module is not None
        return {} if self._cut_off() else full_optimizer_state(plain, self.lightning_module)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if not self._cut_off():
            super().save_checkpoint(full(checkpoint), filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(optimizer, state, self.lightning_module)
