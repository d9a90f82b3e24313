"""The rules, by family; importing this package registers all of them."""

from lightning_shard.ops import autograd as autograd
from lightning_shard.ops import composite as composite
from lightning_shard.ops import conv as conv
from lightning_shard.ops import conv_transpose as conv_transpose
from lightning_shard.ops import distance as distance
from lightning_shard.ops import extreme as extreme
from lightning_shard.ops import fft as fft
from lightning_shard.ops import index as index
from lightning_shard.ops import join as join
from lightning_shard.ops import layer_norm as layer_norm
from lightning_shard.ops import linear as linear
from lightning_shard.ops import loss as loss
from lightning_shard.ops import norm as norm
from lightning_shard.ops import pointwise as pointwise
from lightning_shard.ops import pool as pool
from lightning_shard.ops import reduce as reduce
from lightning_shard.ops import scan as scan
from lightning_shard.ops import show as show
from lightning_shard.ops import softmax as softmax
from lightning_shard.ops import sort as sort
from lightning_shard.ops import view as view
from lightning_shard.ops.registry import UnsupportedOperationError as UnsupportedOperationError
from lightning_shard.ops.registry import functions_with_rules as functions_with_rules
from lightning_shard.ops.registry import implements as implements
from lightning_shard.ops.registry import name_of as name_of
from lightning_shard.ops.registry import rule_for as rule_for
