"""The rules, by family; importing this package registers all of them."""

from lightning_shard.ops import attention as attention
from lightning_shard.ops import dense as dense
from lightning_shard.ops import elementwise as elementwise
from lightning_shard.ops import norm as norm
from lightning_shard.ops import reduce as reduce
from lightning_shard.ops import spectral as spectral
from lightning_shard.ops import view as view
from lightning_shard.ops import window as window
from lightning_shard.ops.registry import functions_with_rules as functions_with_rules
from lightning_shard.ops.registry import implements as implements
from lightning_shard.ops.registry import limits_of as limits_of
from lightning_shard.ops.registry import name_of as name_of
from lightning_shard.ops.registry import rule_for as rule_for
