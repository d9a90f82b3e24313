"""Saves and reads for a strategy of the Trainer: weights, optimizers, and the place in a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.trainer.host import logged_so_far
from lightning_shard.trainer.ordered_batches import unfinished
from lightning_shard.trainer.peers import Peers
from lightning_shard.trainer.resumed_callbacks import frozen_in
from lightning_shard.trainer.sample_order import SampleOrder
from lightning_shard.trainer.saving import Saver


class Checkpoints:
    """Mixin of a strategy: its checkpoints are those of all ranks together."""

    # the strategy has these
    _module: Any
    checkpoint_io: Any
    device_mesh: Any
    processes: Any
    broadcast: Any
    optimizers: Any
    peers: Peers
    restore_checkpoint_after_setup: Any
    root_device: Any
    samples: SampleOrder
    saver: Saver
    sharding_options: ShardingOptions

    # whether all ranks begin with a checkpoint; asked from setup_environment on
    _is_compared = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights as the format wants them: whole on the first rank, or shards."""
        return {} if self.peers.is_disconnected() else self.saver.gather_module(self._module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state as the format wants it: whole on the first rank, or shards."""
        if self.peers.is_disconnected():
            return {}
        return self.saver.gather_optimizer(optimizer, self._module)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint of all ranks; none once a rank is lost."""
        if self.peers.is_disconnected():
            return
        self.saver.write(
            self.saver.mark(
                checkpoint,
                self.device_mesh,
                self.root_device,
                unfinished=unfinished(self._module.trainer),
                orders=self.samples.drawn_from(),
                generators=self.samples.own_states(),
                sharding=self.sharding_options.mode,
                logged=logged_so_far(self._module.trainer),
                frozen=frozen_in(self._module),
            ),
            self.broadcast(filepath),
            self.checkpoint_io,
            module=self._module,
            optimizers=self.optimizers,
            storage_options=storage_options,
        )

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a file or a directory of shards."""
        if not self.peers.is_disconnected():
            self.saver.remove(filepath, self.checkpoint_io)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file, or this rank's parts of a directory, of any mesh."""
        self._compare_resuming(True)
        return self.saver.read(
            checkpoint_path,
            self.checkpoint_io,
            self._module,
            weights_only=weights_only,
            into_sharded=self.restore_checkpoint_after_setup,
        )

    def _compare_resuming(self, begins: bool) -> None:
        """Raise on all ranks if some read a checkpoint where others begin anew, once a stage.

        Shards of a module that had no memory read it after their setup, and are not compared.
        """
        if not self._is_compared and not self.restore_checkpoint_after_setup:
            self._is_compared = True
            answer = {"the answer whether it begins with a checkpoint": str(begins)}
            self.processes.compare("checkpoint", answer, check=self.peers.check)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load each rank's part of the weights."""
        self.saver.load_module(self._module, checkpoint, self.root_device, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each rank's part of the states."""
        self.saver.load_optimizers(self.optimizers, checkpoint, self._module)
