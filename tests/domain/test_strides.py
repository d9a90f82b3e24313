"""Each part knows the strides that the whole tensor has in one process, or that nobody knows them.

A tensor that fills its memory has parts that fill theirs, in the same order of dims. Then a view of
the whole is one of each part.
"""

import random
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard import Tiles, shard
from lightning_shard.domain.strides import are_dense
from lightning_shard.domain.subdomain import Subdomain
from tests.ops import database
from tests.ops.test_operators import run
from tests.parity import mesh_of
from tests.random_programs import FUNCTIONS, Draw

# not mended yet: a clone keeps the holes of a slice in torch, and matrices of no columns lie in
# columns. The others differ for turned operands alone: resizing, padding, transposed convolution
# of an image that only looks like channels_last, a plain tensor at a split index, and gradients.
OTHERWISE = {
    "select_scatter", "slice_scatter", "mm", "nn.functional.adaptive_max_pool2d",
    "nn.functional.conv_transpose2d", "nn.functional.pad.constant", "__getitem__", "convert",
    "nn.functional.interpolate.area", "autograd",
}  # fmt: skip
BEGINS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]


@pytest.mark.spmd(2)
@pytest.mark.parametrize("begin", BEGINS)
def test_on_ranks(begin: int):
    check(mesh_of(2), 1, seeds_of(begin))


@pytest.mark.slow_rows("sizes0-0")
@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
def test_in_tiles(sizes: tuple[int, ...], begin: int):
    check(Tiles(sizes), len(sizes), seeds_of(begin))


def seeds_of(begin: int) -> range:
    return range(30 * begin, 30 * begin + 30) if begin else range(2)


@torch.no_grad()
def check(where: Any, axes: int, seeds: range) -> None:
    known = all_parts = 0
    for number, name in enumerate(FUNCTIONS):
        for seed in seeds:
            generator = random.Random(1000 * number + seed)
            shape = [generator.randint(1, 6) for _ in range(generator.randint(1, 4))]
            dim, other = generator.randrange(len(shape)), generator.choice(list(FUNCTIONS))
            x = torch.randn(shape, dtype=torch.float64)
            x = turned(x, generator) if generator.random() < 0.5 else x
            steps = [FUNCTIONS[name](Draw(generator, tuple(shape)))]
            try:
                y = steps[0](x)
                steps.append(FUNCTIONS[other](Draw(generator, tuple(y.shape))))
                expected = [y, steps[1](y)]
                split = steps[0](shard(x, where, [dim, (dim + 1) % len(shape)][:axes]))
                found = [split, steps[1](split)]
            except (RuntimeError, IndexError, ValueError):  # not for this shape, or not served
                continue
            for a, b in zip(expected, found, strict=True):
                parts = parts_of(b)
                if parts and parts[0].strides is not None and a.numel():
                    assert steps_of(a.shape, b.stride()) == steps_of(a.shape, a.stride())
                    assert b.is_contiguous() == a.is_contiguous()
                for part in parts:
                    known, all_parts = known + (part.strides is not None), all_parts + 1
                    assert lies_as(part, a), (name, other, seed, shape, part.strides, a.stride())
    assert known > 0.75 * all_parts


def turned(x: Tensor, generator: random.Random) -> Tensor:
    """The tensor, with its dims in memory in a random order."""
    order = generator.sample(range(x.ndim), x.ndim)
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])


def parts_of(x: Any) -> list[Subdomain]:
    parts = getattr(x, "parts", None) or [getattr(x, "subdomain", None)]
    return [part for part in parts if isinstance(part, Subdomain)]


def lies_as(part: Subdomain, whole: Tensor) -> bool:
    strides = part.strides
    if strides is None or not whole.numel():
        return True
    if steps_of(whole.shape, strides) != steps_of(whole.shape, whole.stride()):
        return False
    if part.copied is not None or not are_dense(tuple(whole.shape), strides):
        return True
    order = sorted(range(whole.ndim), key=lambda d: -strides[d])
    return part.local.permute(order).is_contiguous()


def steps_of(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides of dims of several rows; one row has any."""
    return [step for n, step in zip(shape, strides, strict=True) if n > 1]


@pytest.mark.parametrize("limit", [1, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_turned", [False, True], ids=["in rows", "turned"])
@database.in_groups([name for name in database.names() if name not in OTHERWISE])
def test_of_the_conformance_table(names: Sequence[str], is_turned: bool, limit: int):
    for name in names:
        for function, sample, split in database.cases_of(name, limit):
            wrong = differing(function, sample, split, is_turned)
            assert not wrong, f"{name}: {function}({sample}), split {split}: {wrong}"


def differing(
    function: Any, sample: database.Sample, split: tuple[Sequence[int], int], is_turned: bool
) -> list[str]:
    """Call a function on operands in rows or in a random order of dims; say what lies otherwise."""
    chosen, dim = split
    seed, tiles = zlib.crc32(str(sample).encode()), Tiles((3,))

    def lying(number: int, x: Tensor) -> Tensor:
        return turned(x, random.Random(seed + number)) if is_turned and x.ndim > 1 else x

    def cut(number: int, x: Tensor) -> Tensor:
        x = lying(number, x)
        return shard(x, tiles, dim) if number in chosen else x

    try:
        expected, _ = run(function, sample, lying)
        found, _ = run(function, sample, cut)
    except Exception:  # not for these arguments, or not served
        return []
    wrong = list[str]()
    for whole, result in zip(expected, found, strict=True):
        if not (isinstance(whole, Tensor) and whole.layout == torch.strided and whole.numel()):
            continue
        steps = steps_of(whole.shape, whole.stride())
        parts = [part for part in parts_of(result) if not lies_as(part, whole)]
        wrong += [f"{part.strides} with {part.local.stride()}, not {steps}" for part in parts]
        if type(result) is Tensor and steps_of(whole.shape, result.stride()) != steps:
            wrong.append(f"{result.stride()} of a plain tensor, not {steps}")
    return wrong
