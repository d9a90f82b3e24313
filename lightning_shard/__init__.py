"""FSDP2 and spatial domain decomposition for PyTorch Lightning, by changing one argument."""

from lightning_shard.ops import UnsupportedOperationError as UnsupportedOperationError
from lightning_shard.parallelize import parallelize as parallelize
from lightning_shard.strategy import HybridShardStrategy as HybridShardStrategy
from lightning_shard.tensor import DomainTensor as DomainTensor
from lightning_shard.tensor import from_local as from_local
from lightning_shard.tensor import gather as gather
from lightning_shard.tensor import shard as shard
