"""Runs each operation for all tiles of a field, one after the other, in one process."""

from lightning_shard.tiles import dispatch as dispatch  # it serves the functions of fields
