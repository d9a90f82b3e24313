"""Rules for attention."""

from lightning_shard.ops.attention import rule as rule
