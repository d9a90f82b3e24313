"""Checkpoints: what a strategy gathers, writes and reads back."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.checkpoint import full, load_optimizer_state, module_state, optimizer_state
from lightning_shard.checkpoint_files import CheckpointFiles
from lightning_shard.foreign import as_lightning
from lightning_shard.mesh_strategy import MeshStrategy
from lightning_shard.random_state import random_state, set_random_state

OWN_KEY = "lightning_shard"  # in a checkpoint: the mesh, versions, random states


class CheckpointStrategy(MeshStrategy):
    """Ordinary Lightning checkpoints of sharded modules and optimizers."""

    _own: Mapping[str, Any] | None = None  # what a loaded checkpoint says of its run

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        io = self._checkpoint_io
        if io is None:
            io = self._checkpoint_io = CheckpointFiles()
        elif isinstance(io, _WrappingCheckpointIO) and io.checkpoint_io is None:
            io.checkpoint_io = CheckpointFiles()
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._cut_off():
            return {}
        self._share_buffers(self.lightning_module)
        return module_state(self.lightning_module)

    def _share_buffers(self, module: LightningModule) -> None:
        """All ranks go on with the buffers that are saved, those of rank 0 (as under DDP)."""
        if self.world_size > 1:
            for buffer in module.buffers():
                dist.broadcast(torch.view_as_real(buffer) if buffer.is_complex() else buffer, 0)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        assert self.lightning_module is not None
        return {} if self._cut_off() else optimizer_state(plain, self.lightning_module)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._cut_off():
            return
        filepath = self.broadcast(filepath)
        checkpoint = checkpoint | {OWN_KEY: self._own_entry("optimizer_states" in checkpoint)}
        whole = full(checkpoint, keep=self.is_global_zero)
        self._together(lambda: self._write(whole, filepath, storage_options))

    def _write(self, checkpoint: dict[str, Any], filepath: str | Path, options: Any) -> None:
        super().save_checkpoint(checkpoint, filepath, options)

    def _own_entry(self, with_random: bool) -> dict[str, Any]:
        """What this package adds to a checkpoint; the same on all ranks but for random states."""
        entry: dict[str, Any] = {
            "mesh": self._mesh_sizes(),
            "versions": {"torch": str(torch.__version__), "lightning": lightning.__version__},
        }
        if with_random:
            entry["random"] = self._gather_to_first(random_state(self.root_device))
        return entry

    def _mesh_sizes(self) -> dict[str, int]:
        mesh = self.device_mesh
        assert mesh is not None
        return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))

    def _gather_to_first(self, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(value, values)
        return values or []

    def _together(self, step: Callable[[], Any]) -> None:
        """Run `step`; if it fails on some ranks, all raise, so that none waits for another."""
        error: Exception | None = None
        try:
            step()
        except Exception as err:
            error = err
        texts: list[str | None] = [None] * self.world_size
        text = f"rank {self.global_rank}: {type(error).__name__}: {error}" if error else None
        if self.world_size > 1:
            dist.all_gather_object(texts, text)
        if error is not None:
            raise error
        if failed := [text for text in texts if text]:
            raise RuntimeError(f"the checkpoint is not written; {failed[0]}")

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        assert self.lightning_module is not None
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        checkpoint = as_lightning(loaded, checkpoint_path, self.lightning_module.state_dict())
        self._own = checkpoint.get(OWN_KEY)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint holds {len(states)} optimizers; configure_optimizers returned "
                f"{len(self.optimizers)}. Return as many as when it was saved."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_optimizer_state(optimizer, state, self.lightning_module)

    @override
    def on_train_start(self) -> None:
        """Continue the random numbers of the run that saved, if each rank has its own again."""
        own, self._own = self._own, None
        if own is not None and own["mesh"] == self._mesh_sizes() and "random" in own:
            set_random_state(own["random"][self.global_rank], self.root_device)
