"""The four collectives and their adjoints: values, first and second derivatives, on real ranks.

Each is made a function of whole tensors, alike on every rank: a rank takes its part, the collective
runs, and the parts are put together. So gradcheck perturbs all ranks alike, and what it computes by
differences is the Jacobian of the function of the whole.
"""

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.autograd import Function, gradcheck, gradgradcheck

from lightning_shard.domain.comm import (
    add_to_owners,
    all_reduce,
    all_reduce_extreme,
    exchange,
    of_all,
    transpose,
)
from lightning_shard.domain.fetch import Needs, route, segments
from lightning_shard.domain.layout import Factor, part_sizes, partition
from lightning_shard.domain.transfer import Transfer, transferred

EXTENT = 7


class Part(Function):
    """This rank's rows of a tensor that all ranks have; the adjoint of `Whole`."""

    @staticmethod
    def forward(ctx, x, sizes, dim):
        ctx.plan = sizes, dim
        return x.split(sizes, dim)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        return Whole.apply(grad, *ctx.plan), None, None


class Whole(Function):
    """The rows of all ranks, on every rank; the adjoint of `Part`."""

    @staticmethod
    def forward(ctx, part, sizes, dim):
        ctx.plan = sizes, dim
        shape = list(part.shape)
        shape[dim] = sum(sizes)
        result = part.new_zeros(shape)
        result.split(sizes, dim)[dist.get_rank()].copy_(part)
        dist.all_reduce(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        return Part.apply(grad, *ctx.plan), None, None


def halo(ranks: int) -> Needs:
    """Two rows before a part and one after it; nothing for a rank without rows."""
    return tuple(
        ((max(low - 2, 0), min(high + 1, EXTENT)),) if low < high else ()
        for low, high in pairwise(partition(EXTENT, ranks))
    )


def mirrored(ranks: int) -> Needs:
    """The rows in reverse order, one span for each."""
    return tuple(
        tuple((EXTENT - 1 - row, EXTENT - row) for row in range(low, high))
        for low, high in pairwise(partition(EXTENT, ranks))
    )


def everything(ranks: int) -> Needs:
    return (((0, EXTENT),),) * ranks


def sizes_of(needs: Needs) -> list[int]:
    return [sum(high - low for low, high in spans) for spans in needs]


def plan(needs: Needs, ranks: int):
    return route(segments((Factor(EXTENT, (0,)),), (ranks,)), dist.get_rank(), needs)


def cases(ranks: int) -> dict:
    """For each collective a function of a whole tensor, and the shape of that."""
    rows, group = part_sizes(EXTENT, ranks), dist.group.WORLD
    columns = part_sizes(5, ranks)
    made = {}
    for name, kind in (("halo", halo), ("mirrored", mirrored), ("everything", everything)):
        needs = kind(ranks)
        travel, fetched = plan(needs, ranks), sizes_of(needs)

        def bring(x, travel=travel, fetched=fetched):
            return Whole.apply(exchange(Part.apply(x, rows, 0), 0, travel, group), fetched, 0)

        def give_back(y, travel=travel, fetched=fetched):
            own = rows[dist.get_rank()]
            part = add_to_owners(Part.apply(y, fetched, 0), 0, own, travel, group)
            return Whole.apply(part, rows, 0)

        made[f"exchange {name}"] = bring, (EXTENT, 2)
        made[f"add_to_owners {name}"] = give_back, (sum(fetched), 2)

    def turn(x):
        part = transpose(Part.apply(x, rows, 0), 1, 0, columns, rows, group)
        return Whole.apply(part, columns, 1)

    def add(x):
        total = all_reduce(Part.apply(x, [2] * ranks, 0), group)
        return Whole.apply(total, [2] * ranks, 0)

    made["transpose"] = turn, (EXTENT, 5)
    made["all_reduce"] = add, (2 * ranks, 3)
    return made


def check_all(ranks: int) -> None:
    torch.manual_seed(0)
    for name, (function, shape) in cases(ranks).items():
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert gradcheck(function, x), name
        assert gradgradcheck(function, x), name


@pytest.mark.spmd(2)
def test_derivatives_on_two_ranks():
    check_all(2)


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_derivatives_on_three_ranks():
    check_all(3)


@pytest.mark.spmd(3)
def test_values():
    ranks, rank = 3, dist.get_rank()
    rows = part_sizes(EXTENT, ranks)
    x = torch.arange(EXTENT * 2.0).reshape(EXTENT, 2)
    own = x.split(rows)[rank]
    ((low, high),) = halo(ranks)[rank]
    travel = plan(halo(ranks), ranks)
    around = exchange(own, 0, travel, dist.group.WORLD)
    assert around.equal(x[low:high])
    back = add_to_owners(
        torch.ones_like(around), 0, rows[rank], plan(halo(ranks), ranks), dist.group.WORLD
    )
    held = [range(*spans[0]) for spans in halo(ranks)]
    wanted = torch.tensor([[float(sum(row in h for h in held))] * 2 for row in range(EXTENT)])
    assert back.equal(wanted.split(rows)[rank])
    assert all_reduce(torch.tensor([rank, 1.0]), dist.group.WORLD).tolist() == [3.0, 3.0]
    most = all_reduce_extreme(torch.tensor([rank, -rank]), dist.ReduceOp.MAX, dist.group.WORLD)
    assert most.tolist() == [2, 0]
    assert of_all(torch.tensor([rank]), dist.group.WORLD).tolist() == [[0], [1], [2]]


@pytest.mark.spmd(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool,
                                   torch.int64, torch.complex64])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3)])
def test_what_all_have(dtype, shape):
    """Gathered of any dtype and shape, also turned, with a graph and of one row of a column."""
    parts = torch.arange(2.0 * math.prod(shape)).reshape(2, *shape).to(dtype)
    own = parts[dist.get_rank()]
    turned = [own, own.mT, own.T[:1].T] if len(shape) > 1 else [own]
    for number, x in enumerate(turned):
        given = x.clone().requires_grad_() if dtype.is_floating_point and not number else x
        found = of_all(given, dist.group.WORLD)
        each = [parts[0], parts[1]]
        wanted = [each, [p.mT for p in each], [p.T[:1].T for p in each]][number] if number else each
        assert not found.requires_grad
        assert found.equal(torch.stack(wanted))


@pytest.mark.spmd(3)
def test_adjoints():
    """<A x, y> = <x, A' y>, summed over the ranks, where A' is what backward computes."""
    torch.manual_seed(dist.get_rank())
    ranks, group = 3, dist.group.WORLD
    rows = part_sizes(EXTENT, ranks)[dist.get_rank()]
    columns = part_sizes(5, ranks)
    collectives = {
        "exchange": (lambda x: exchange(x, 0, plan(halo(ranks), ranks), group), (rows, 5)),
        "transpose": (
            lambda x: transpose(x, 1, 0, columns, part_sizes(EXTENT, ranks), group), (rows, 5)
        ),
        "all_reduce": (lambda x: all_reduce(x, group), (4,)),
        "transferred": (lambda x: transferred(x, ring(rows, ranks), group), (rows, 5)),
    }  # fmt: skip
    for name, (function, shape) in collectives.items():
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        result = function(x)
        y = torch.randn_like(result, requires_grad=True)
        (adjoint,) = torch.autograd.grad(result, x, y, create_graph=True)
        products = torch.stack([(result * y).sum(), (x * adjoint).sum()]).detach()
        dist.all_reduce(products)
        torch.testing.assert_close(products[0], products[1], msg=name)
        # the adjoint is linear in y, and its own adjoint is the collective
        again = torch.autograd.grad(adjoint, y, x.detach())[0]
        torch.testing.assert_close(again, result.detach(), msg=name)


def ring(rows: int, ranks: int) -> Transfer:
    """The first row of each rank goes to the next one, which puts it at its first place, twice."""
    rank = dist.get_rank()
    taken, put = torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    given = [2 if peer == (rank + 1) % ranks else 0 for peer in range(ranks)]
    got = [2 if peer == (rank - 1) % ranks else 0 for peer in range(ranks)]
    return Transfer(taken, given, put, got, (rows, rows), taken_often=True, put_often=True)
