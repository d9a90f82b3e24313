"""What the ranks of the tests decide for DTensors is what torch decides."""

import functools
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from tests import pool
from tests.parity import mesh_of
from tests.quick_dtensor import meta_of_torch

pytestmark = pytest.mark.skipif(pool.UNPATCHED, reason="the quick decisions are left out")

R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial()
propagate = ShardingPropagator.propagate_op_sharding_non_cached
seen: list[str] = []


def as_torch_does(self, schema):
    """Decides in both ways."""
    quick = propagate(self, schema)
    expand = utils.expand_to_full_mesh_op_strategy
    if isinstance(expand, functools.partial):  # else this is the second one
        with mock.patch.object(utils, "expand_to_full_mesh_op_strategy", *expand.args):
            wanted = propagate(self, schema)
        assert repr(quick) == repr(wanted), schema
        assert self._propagate_tensor_meta_non_cached(schema) == meta_of_torch(self, schema)
        seen.append(str(schema.op))
    return quick


@pytest.mark.quick_rows("[(Replicate(), Replicate())]")
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    "placements",
    [[(R, R)], [(S0, R), (S0, R)], [(S0, S0), (S0, S1)], [(R, S1), (S0, R)], [(SUM, S0)]],
    ids=str,
)
def test_same_decisions(placements):
    first = DTensor.from_local(torch.ones(4, 4), mesh_of(2, 2), (SUM, S0))
    made = [first if p == (SUM, S0) else first.redistribute(placements=p) for p in placements]
    with mock.patch.object(ShardingPropagator, "propagate_op_sharding_non_cached", as_torch_does):
        seen.clear()
        x, y = made[0], made[-1]
        z = torch.zeros_like(x.detach())
        for result in (x.sqrt() / y, x + y, x @ y.t(), (x * y).sum(), y.exp().mean(0), z.mul(2)):
            assert isinstance(result, DTensor)
        t, halves = x.t(), x.to(torch.bfloat16)
        for result in (t.sqrt(), t / 3, t.clone(), t + 1, halves * 2.5, halves + x, x.int() / 2):
            assert isinstance(result, DTensor)
        more = [
            x + 1j,
            x.int() + 1,
            torch.add(x, y, alpha=0.5),
            torch.div(x, 2, rounding_mode="floor"),
        ]
        more += [
            torch.zeros_like(x, dtype=torch.int),
            t.clone(memory_format=torch.contiguous_format),
        ]
        assert all(isinstance(result, DTensor) for result in more)
        if made[0].placements == made[-1].placements:
            z.lerp_(y, 0.5).mul_(2).addcmul_(x, y).add_(y).addcdiv_(x, y)
        assert len(seen) > 8
