"""Rules that reduce rows: sums, extremes, softmax, sorting, losses."""

from lightning_shard.ops.reduce import extreme as extreme
from lightning_shard.ops.reduce import histogram as histogram
from lightning_shard.ops.reduce import loss as loss
from lightning_shard.ops.reduce import scan as scan
from lightning_shard.ops.reduce import softmax as softmax
from lightning_shard.ops.reduce import sort as sort
from lightning_shard.ops.reduce import sums as sums
