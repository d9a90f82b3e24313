"""Rules for normalization."""

from lightning_shard.ops.norm import batch_norm as batch_norm
from lightning_shard.ops.norm import layer_norm as layer_norm
from lightning_shard.ops.norm import sync_norm as sync_norm
