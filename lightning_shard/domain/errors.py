"""Defines the error of operations that cannot run on split tensors."""

from lightning_shard.processes.errors import LightningShardError


class UnsupportedOperationError(LightningShardError, NotImplementedError):
    """An operation, or this use of it, has no rule for tensors split over a domain mesh."""

    is_named = False  # whether the message names the function that was called
