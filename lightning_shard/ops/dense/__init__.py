"""Rules for products, linear algebra, distances and recurrent layers."""

from lightning_shard.ops.dense import distance as distance
from lightning_shard.ops.dense import linalg as linalg
from lightning_shard.ops.dense import linear as linear
from lightning_shard.ops.dense import recurrent as recurrent
