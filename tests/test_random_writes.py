"""Writes in place into what random functions give reach what they reach in one process.

A function of a tensor gives the tensor itself, a view or a copy of it, by the order in memory of
the whole. A second function gives a view of that, or not, and the result is written. Then all three
tensors have the values of one process, or the write is refused, on all ranks alike.
"""

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
from tests.random_programs import STEPS, Draw, Step

VIEWS: dict[str, Callable[[Draw], Step]] = {
    "narrow": lambda draw: lambda x: x.narrow(draw.dim, 0, draw.count),
    "movedim": lambda draw: lambda x: x.movedim(draw.dim, 0),
    "rows": lambda draw: lambda x: x[draw.rows],
    "first part": lambda draw: lambda x: x.split(draw.count, draw.dim)[0],
    "last part": lambda draw: lambda x: x.chunk(draw.count, draw.dim)[-1],
    "row": lambda draw: lambda x: x.unbind(draw.dim)[draw.place],
    "transpose": lambda draw: lambda x: x.transpose(-1, draw.dim),
    "flatten": lambda draw: lambda x: x.flatten(draw.dim),
    "ravel": lambda _: lambda x: x.ravel(),
    "unflatten": lambda draw: lambda x: x.unflatten(draw.dim, (draw.divisor, -1)),
    "unsqueeze": lambda draw: lambda x: x.unsqueeze(draw.dim),
    "squeeze": lambda draw: lambda x: x.squeeze(draw.dim),
    "reshape": lambda _: lambda x: x.reshape(tuple(reversed(x.shape))),
    "turned": lambda draw: lambda x: x.permute(draw.order).reshape(x.shape),
    "contiguous": lambda draw: lambda x: x.permute(draw.order).contiguous(),
    "unfold": lambda draw: lambda x: x.unfold(draw.dim, draw.count, draw.count),
    "every second": lambda _: lambda x: x.flatten()[::2],
    "detach": lambda _: lambda x: x.detach(),
}
WRITES: list[Callable[[Tensor], Any]] = [
    lambda y: y.add_(1), lambda y: y.mul_(2), lambda y: y.fill_(3), lambda y: y.clamp_(min=0.1),
    lambda y: F.relu(y, inplace=True), lambda y: y.copy_(y * 0.5 + 1),
    lambda y: y.__setitem__(0, 5.0), lambda y: y.__setitem__(..., 7.0),
]  # fmt: skip
FUNCTIONS = STEPS | VIEWS
RANKS = 3


@pytest.mark.spmd(RANKS)
@pytest.mark.parametrize(
    "begin", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_writes_on_ranks(begin: int):
    check(mesh_of(RANKS), range(30 * begin, 30 * begin + (30 if begin else 5)))


@pytest.mark.parametrize(
    "begin", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_writes_in_tiles(begin: int):
    check(Tiles((RANKS,)), range(30 * begin, 30 * begin + (30 if begin else 5)))


@torch.no_grad()
def check(where: Any, seeds: range) -> None:
    same = 0
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
            about = name, other, write, seed, shape, dim
            found: list[Tensor] | None = None
            try:
                found = written(shard(start.clone(), where, dim), steps, WRITES[write])
            except RuntimeError as error:
                # torch fills memory that several elements share, and copies no rows back into it
                shares = "more than one element" in str(error)
                if not (shares or isinstance(error, UnsupportedOperationError)):
                    raise
            if not refused_alike(where, found is None, about) and found is not None:
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


def refused_alike(where: Any, is_refused: bool, about: Any) -> bool:
    if isinstance(where, Tiles):
        return is_refused
    count = torch.tensor(int(is_refused))
    dist.all_reduce(count)
    assert count in (0, RANKS), f"refused on some ranks only: {about}"
    return is_refused
