"""Rules that treat each element by itself, random numbers and autograd included."""

from lightning_shard.ops.elementwise import autograd as autograd
from lightning_shard.ops.elementwise import bounds as bounds
from lightning_shard.ops.elementwise import composite as composite
from lightning_shard.ops.elementwise import dropout as dropout
from lightning_shard.ops.elementwise import formula as formula
from lightning_shard.ops.elementwise import forward_ad as forward_ad
from lightning_shard.ops.elementwise import pointwise as pointwise
from lightning_shard.ops.elementwise import random as random
from lightning_shard.ops.elementwise import show as show
