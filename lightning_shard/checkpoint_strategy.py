"""Checkpoints: what a strategy gathers, writes and reads back."""

from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_shard import sharded_directory
from lightning_shard.checkpoint import (
    full,
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
    parameter_names,
)
from lightning_shard.checkpoint_files import CheckpointFiles, is_local, local_path
from lightning_shard.foreign import as_lightning, plain_name
from lightning_shard.mesh_strategy import MeshStrategy
from lightning_shard.random_state import random_state, set_random_state
from lightning_shard.ranks import copy_from_first, gather_to_first, together
from lightning_shard.stored import bytes_of
from lightning_shard.weight_files import UnsafeFileError

OWN_KEY = "lightning_shard"  # in a checkpoint: the mesh, versions, random states
FORGOTTEN = (
    "Lightning 2.6 forgets weights_only=False for a module on the meta device, so build it on a "
    "real device"
)
SHARDED_ABOVE_BYTES = 16 * 2**30  # a single file takes as much CPU memory on rank 0

Format = Literal["auto", "single", "sharded"]


class CheckpointStrategy(MeshStrategy):
    """Ordinary Lightning checkpoints of sharded modules and optimizers, or sharded directories."""

    checkpoint_format: Format = "auto"
    async_checkpoint: bool = False
    _own: Mapping[str, Any] | None = None  # what a loaded checkpoint says of its run
    _pending: Future | None = None  # a directory that is being written
    _background: Any = None  # a group of all ranks, for the thread that writes

    def set_checkpoint_options(self, checkpoint_format: Format, async_checkpoint: bool) -> None:
        """Choose how checkpoints are written.

        Raises:
            ValueError: An option has no such value, or the two exclude each other.
        """
        if checkpoint_format not in ("auto", "single", "sharded"):
            raise ValueError(
                "checkpoint_format must be 'auto', 'single' or 'sharded'; got "
                f"{checkpoint_format!r}."
            )
        if async_checkpoint and checkpoint_format == "single":
            raise ValueError(
                "async_checkpoint writes sharded directories, so checkpoint_format cannot be "
                "'single'; use 'sharded', or give the Trainer Lightning's AsyncCheckpointIO."
            )
        self.checkpoint_format, self.async_checkpoint = checkpoint_format, async_checkpoint

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
        state = module_state(self.lightning_module)
        self._share_buffers(state)
        return state

    def _share_buffers(self, state: Mapping[str, Any]) -> None:
        """All ranks go on with the buffers that are saved, those of rank 0 (as under DDP)."""
        assert self.lightning_module is not None
        parameters = {plain_name(name) for name, _ in self.lightning_module.named_parameters()}
        for name, value in state.items():
            if name not in parameters and isinstance(value, Tensor):
                copy_from_first(value)

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
        self.finish_saving()
        filepath = self.broadcast(filepath)
        self._share_buffers(
            checkpoint.get("state_dict", {})
        )  # a callback may have put in its averages
        checkpoint = checkpoint | {OWN_KEY: self._own_entry("optimizer_states" in checkpoint)}
        if self._writes_directory(checkpoint, filepath, storage_options):
            self._save_directory(checkpoint, local_path(filepath))
        else:
            whole = full(checkpoint, keep=self.is_global_zero)
            together(lambda: self._save_file(whole, filepath, storage_options))

    def _save_file(self, checkpoint: dict[str, Any], filepath: str | Path, options: Any) -> None:
        super().save_checkpoint(checkpoint, filepath, options)

    def _writes_directory(self, checkpoint: Any, filepath: str | Path, options: Any) -> bool:
        able = is_local(filepath) and options is None
        if self.checkpoint_format == "sharded" and not able:
            raise ValueError(
                f"checkpoint_format 'sharded' needs a directory on a mounted file system and no "
                f"storage_options; got '{filepath}', {options}. Use checkpoint_format 'single'."
            )
        if self.checkpoint_format != "auto":
            return self.checkpoint_format == "sharded"
        default_io = type(self.checkpoint_io) is CheckpointFiles
        large = bytes_of(checkpoint) > SHARDED_ABOVE_BYTES
        return able and default_io and (large or self.async_checkpoint)

    def _save_directory(self, checkpoint: dict[str, Any], path: Path) -> None:
        assert self.lightning_module is not None
        names = [parameter_names(o, self.lightning_module) for o in self.optimizers]
        tensors, rest = sharded_directory.split_off(checkpoint, names)
        rest = full(rest, keep=self.is_global_zero)
        own = checkpoint[OWN_KEY]
        about = {key: checkpoint[key] for key in ("epoch", "global_step") if key in checkpoint}
        about |= {key: own[key] for key in ("mesh", "versions")} | {"world_size": self.world_size}
        about["hyper_parameters"] = checkpoint.get("hyper_parameters", {})
        if not self.async_checkpoint:
            sharded_directory.write(path, tensors, rest, about)
            return
        if self._background is None:
            timeout = timedelta(seconds=self.timeout_s)
            self._background = dist.new_group(backend="gloo", timeout=timeout)
        self._pending = sharded_directory.write_later(path, tensors, rest, about, self._background)

    def finish_saving(self) -> None:
        """Wait for a directory that is being written; all ranks raise if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None and not self._cut_off():
            together(pending.result)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if not self._cut_off():
            self.finish_saving()
            super().remove_checkpoint(filepath)

    def _own_entry(self, with_random: bool) -> dict[str, Any]:
        """What this package adds to a checkpoint; the same on all ranks but for random states."""
        entry: dict[str, Any] = {
            "mesh": self._mesh_sizes(),
            "versions": {
                "torch": str(torch.__version__),
                "lightning": lightning.__version__,
                "lightning_shard": version("lightning_shard"),
            },
        }
        if with_random:
            entry["random"] = gather_to_first(random_state(self.root_device))
        return entry

    def _mesh_sizes(self) -> dict[str, int]:
        mesh = self.device_mesh
        assert mesh is not None
        return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        assert self.lightning_module is not None
        self.finish_saving()
        try:
            loaded = self._load(checkpoint_path, weights_only)
        except UnsafeFileError as err:
            if weights_only is None and self.restore_checkpoint_after_setup:
                raise UnsafeFileError(err.path, err.found, FORGOTTEN) from err
            raise
        checkpoint = as_lightning(loaded, checkpoint_path, self.lightning_module.state_dict())
        self._own = checkpoint.get(OWN_KEY)
        return checkpoint

    def _load(self, checkpoint_path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        if is_local(checkpoint_path) and local_path(checkpoint_path).is_dir():
            folder = local_path(checkpoint_path)
            together(lambda: sharded_directory.check(folder))
            return sharded_directory.read_directory(folder, weights_only is not False)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_module_state(self.lightning_module, checkpoint["state_dict"], strict)
        for metric in self.lightning_module.modules():
            if isinstance(metric, Metric):  # which takes over the tensors of the file, on the CPU
                metric.to(self.root_device)

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
