"""FSDP2 and spatial domain decomposition for PyTorch Lightning, by changing one argument."""

from lightning_shard import functional as functional
from lightning_shard.accelerator import XPUAccelerator as XPUAccelerator
from lightning_shard.clip import clip_grad_norm_ as clip_grad_norm_
from lightning_shard.clip import clip_grad_value_ as clip_grad_value_
from lightning_shard.device_timer import DeviceTimer as DeviceTimer
from lightning_shard.domain import Subdomain as Subdomain
from lightning_shard.escape import allow_gather as allow_gather
from lightning_shard.escape import local_map as local_map
from lightning_shard.escape import whole_parameters as whole_parameters
from lightning_shard.function import allow_function as allow_function
from lightning_shard.load_weights import load_weights as load_weights
from lightning_shard.ops import UnsupportedOperationError as UnsupportedOperationError
from lightning_shard.ops.random import use_exact_random as use_exact_random
from lightning_shard.ops.registry import register_rule as register_rule
from lightning_shard.ops.spectral_plan import spectral_method as spectral_method
from lightning_shard.options import ShardingOptions as ShardingOptions
from lightning_shard.parallelize import parallelize as parallelize
from lightning_shard.placement import from_local as from_local
from lightning_shard.placement import gather as gather
from lightning_shard.placement import shard as shard
from lightning_shard.plain_gradients import no_sync as no_sync
from lightning_shard.predictions import PredictionWriter as PredictionWriter
from lightning_shard.predictions import predictions_in_order as predictions_in_order
from lightning_shard.progress import SamplesPerSecond as SamplesPerSecond
from lightning_shard.strategy import HybridShardStrategy as HybridShardStrategy
from lightning_shard.tensor import DomainTensor as DomainTensor
