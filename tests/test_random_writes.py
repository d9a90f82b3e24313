"""Writes in place into what random functions give reach what they reach in one process.

A function of a tensor gives the tensor itself, a view or a copy of it, by the order in memory of
the whole. A second function gives a view of that, or not, and the result is written. Then all three
tensors have the values of one process, or the write is refused, on all ranks alike.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_shard import Tiles, UnsupportedOperationError, gather, shard
from tests.parity import mesh_of
from tests.random_programs import FUNCTIONS, VIEWS, Draw, Step

WRITES: list[Callable[[Tensor], Any]] = [
    lambda y: y.add_(1), lambda y: y.mul_(2), lambda y: y.fill_(3), lambda y: y.clamp_(min=0.1),
    lambda y: F.relu(y, inplace=True), lambda y: y.copy_(y * 0.5 + 1),
    lambda y: y.__setitem__(0, 5.0), lambda y: y.__setitem__(..., 7.0),
]  # fmt: skip
BEGINS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]


@pytest.mark.spmd(3)
@pytest.mark.parametrize("begin", BEGINS)
def test_writes_on_ranks(begin: int):
    check((3,), seeds_of(begin))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("begin", BEGINS[1:])
def test_writes_on_two_ranks(begin: int):
    check((2,), seeds_of(begin))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("begin", BEGINS)
def test_writes_on_a_grid_of_ranks(begin: int):
    check((2, 2), seeds_of(begin))


@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
def test_writes_in_tiles(sizes: tuple[int, ...], begin: int):
    check(sizes, seeds_of(begin), Tiles(sizes))


def seeds_of(begin: int) -> range:
    return range(30 * begin, 30 * begin + 30) if begin else range(3)


@torch.no_grad()
def check(sizes: tuple[int, ...], seeds: range, tiles: Tiles | None = None) -> None:
    same, ranks = 0, math.prod(sizes)
    where = tiles or mesh_of(*sizes)
    for number, name in enumerate(FUNCTIONS):
        for seed in seeds:
            generator = random.Random(1000 * number + seed)
            shape = [generator.randint(1, 6) for _ in range(generator.randint(1, 4))]
            start = torch.randn(
                shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
            )
            steps = [FUNCTIONS[name](Draw(generator, tuple(shape)))]
            dim, other = generator.randrange(len(shape)), generator.choice(list(VIEWS))
            write = generator.randrange(len(WRITES))
            try:
                made = steps[0](start)
                steps.append(VIEWS[other](Draw(generator, tuple(made.shape))))
                expected = written(start.clone(), steps, WRITES[write])
            except (RuntimeError, IndexError, ValueError):  # not for this shape
                continue
            dims = [dim, (dim + 1) % len(shape)][: len(sizes)]
            about = name, other, write, seed, shape, dims
            found: list[Tensor] | None = None
            try:
                found = written(shard(start.clone(), where, dims), steps, WRITES[write])
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
                for x, correct in zip(found, expected, strict=True):
                    whole = x if type(x) is Tensor else gather(x)
                    torch.testing.assert_close(whole, correct, msg=lambda m, a=about: f"{a}: {m}")
                same += 1
    assert same > 20 * len(seeds)


def written(x: Tensor, steps: list[Step], write: Callable[[Tensor], Any]) -> list[Tensor]:
    """The tensor, what the first step gives, and what the second gives, which is written."""
    y = steps[0](x)
    z = steps[1](y)
    write(z)
    return [x, y, z]
