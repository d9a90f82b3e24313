"""Rules for windows that slide over rows: convolution, pooling, padding, interpolation."""

from lightning_shard.ops.window import adaptive_max_pool as adaptive_max_pool
from lightning_shard.ops.window import adaptive_pool as adaptive_pool
from lightning_shard.ops.window import boxes as boxes
from lightning_shard.ops.window import conv as conv
from lightning_shard.ops.window import conv_transpose as conv_transpose
from lightning_shard.ops.window import deformable as deformable
from lightning_shard.ops.window import grid_sample as grid_sample
from lightning_shard.ops.window import interpolate as interpolate
from lightning_shard.ops.window import pad as pad
from lightning_shard.ops.window import pool as pool
from lightning_shard.ops.window import sliding as sliding
from lightning_shard.ops.window import unpool as unpool
