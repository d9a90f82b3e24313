"""Writes in place into what random functions give reach what they reach in one process.

A function of a tensor gives the tensor itself, a view or a copy of it, by the order in memory of
the whole. A second function gives a view of that, or not, and one of the three tensors is written.
Then all have the values of one process, or the write or a use of old rows is refused, on all ranks
alike. Written with a graph, they also give the gradient of one process.
"""

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_shard import Tiles, UnsupportedOperationError, gather, shard
from lightning_shard.tensor.placement import is_field
from tests.parity import mesh_of
from tests.random_programs import FUNCTIONS, VIEWS, Draw, Step

WRITES: list[Callable[[Tensor], Any]] = [
    lambda y: y.add_(1), lambda y: y.mul_(2), lambda y: y.fill_(3), lambda y: y.clamp_(min=0.1),
    lambda y: F.relu(y, inplace=True), lambda y: y.copy_(y * 0.5 + 1),
    lambda y: y.__setitem__(0, 5.0), lambda y: y.__setitem__(..., 7.0),
]  # fmt: skip


class Write(NamedTuple):
    """A function that writes into one of the three tensors."""

    run: Callable[[Tensor], Any]
    target: int


Sharded = Callable[[Tensor], Tensor]
BEGINS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
kinds = pytest.mark.parametrize("with_graph", [False, True], ids=["values", "gradients"])


@kinds
@pytest.mark.slow_rows("0-gradients")
@pytest.mark.spmd(3)
@pytest.mark.parametrize("begin", BEGINS)
def test_writes_on_ranks(begin: int, with_graph: bool):
    check((3,), begin, with_graph)


@kinds
@pytest.mark.spmd(2)
@pytest.mark.parametrize("begin", BEGINS[1:])
def test_writes_on_two_ranks(begin: int, with_graph: bool):
    check((2,), begin, with_graph)


@kinds
@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("begin", BEGINS)
def test_writes_on_a_grid_of_ranks(begin: int, with_graph: bool):
    check((2, 2), begin, with_graph)


@pytest.mark.slow_rows("sizes0-0-values", "sizes1-0-gradients")
@kinds
@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
def test_writes_in_tiles(sizes: tuple[int, ...], begin: int, with_graph: bool):
    check(sizes, begin, with_graph, Tiles(sizes))


def check(sizes: tuple[int, ...], begin: int, with_graph: bool, tiles: Tiles | None = None) -> None:
    outcome = gradient if with_graph else values
    seeds = range(30 * begin, 30 * begin + 30) if begin else range(2)
    same, ranks, where = 0, math.prod(sizes), tiles or mesh_of(*sizes)
    for number, name in enumerate(FUNCTIONS):
        for seed in seeds:
            generator = random.Random(1000 * number + seed)
            shape = [generator.randint(1, 6) for _ in range(generator.randint(1, 4))]
            start = torch.randn(
                shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
            )
            steps = [FUNCTIONS[name](Draw(generator, tuple(shape)))]
            dim, other = generator.randrange(len(shape)), generator.choice(list(VIEWS))
            write = Write(generator.choice(WRITES), generator.choice([0, 1, 2, 2, 2]))
            try:
                made = steps[0](start)
                steps.append(VIEWS[other](Draw(generator, tuple(made.shape))))
                expected = outcome(start.clone(), steps, write, lambda x: x)
            except (RuntimeError, IndexError, ValueError):  # not for this shape
                continue
            dims = [dim, (dim + 1) % len(shape)][: len(sizes)]
            about = name, other, WRITES.index(write.run), write.target, seed, shape, dims
            found: list[Tensor] | None = None
            try:
                found = outcome(start.clone(), steps, write, lambda x, d=dims: shard(x, where, d))
            except RuntimeError as error:
                # torch fills memory that several elements share, and copies no rows back into it
                shares = "more than one element" in str(error)
                if not (shares or isinstance(error, UnsupportedOperationError)):
                    raise
            if tiles is None:
                count = torch.tensor(int(found is None))
                dist.all_reduce(count)
                assert count in (0, ranks), f"refused on some ranks only: {about}"
            if found is not None:
                if with_graph and tiles is None:
                    dist.all_reduce(found[0], dist.ReduceOp.SUM)
                    found[0] /= ranks
                for x, correct in zip(found, expected, strict=True):
                    torch.testing.assert_close(x, correct, msg=lambda m, a=about: f"{a}: {m}")
                same += 1
    assert same > (15 if with_graph else 20) * len(seeds)


@torch.no_grad()
def values(x: Tensor, steps: list[Step], write: Write, split: Sharded) -> list[Tensor]:
    """The tensor, what the first step gives, and what the second gives, once one is written."""
    return [whole(each) for each in written(split(x), steps, write)]


def gradient(x: Tensor, steps: list[Step], write: Write, split: Sharded) -> list[Tensor]:
    """The gradient of a sum over all three tensors, zero if they have none, and the sum."""
    x.requires_grad_()
    total = torch.zeros((), dtype=x.dtype)
    for number, each in enumerate(map(whole, written(split(1.5 * x), steps, write))):
        weights = torch.arange(float(each.numel())).reshape(each.shape).add(number).cos()
        total = total + (weights * (each + each.square())).sum()
    if total.requires_grad:
        total.backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad, total.detach()]


def whole(x: Tensor) -> Tensor:
    return gather(x) if is_field(x) else x.clone()  # which refuses rows that are old


def written(x: Tensor, steps: list[Step], write: Write) -> list[Tensor]:
    y = steps[0](x)
    found = [x, y, steps[1](y)]
    write.run(found[write.target])
    return found
