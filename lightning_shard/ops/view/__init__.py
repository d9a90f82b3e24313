"""Rules that change shape, order or choice of elements."""

from lightning_shard.ops.view import assign as assign
from lightning_shard.ops.view import index as index
from lightning_shard.ops.view import join as join
from lightning_shard.ops.view import mask as mask
from lightning_shard.ops.view import permute as permute
from lightning_shard.ops.view import put as put
from lightning_shard.ops.view import repeat as repeat
from lightning_shard.ops.view import reshape as reshape
from lightning_shard.ops.view import scatter as scatter
from lightning_shard.ops.view import select as select
from lightning_shard.ops.view import shift as shift
from lightning_shard.ops.view import shuffle as shuffle
from lightning_shard.ops.view import split as split
