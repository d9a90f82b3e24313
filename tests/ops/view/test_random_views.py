"""Random views of views, written on either side: what is seen is what one process sees, or refused.

Left out are `reshape`, `flatten` and `contiguous`, which give views or copies by how memory lies,
and `data`, through which writes are not counted.
"""

import collections
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import assert_same, mesh_of

VIEWS: dict[str, Callable[[Tensor, int, int, int], Tensor]] = {
    "slice": lambda x, d, low, high: x.narrow(d, low, high - low),
    "steps": lambda x, d, low, high: x[(slice(None),) * d + (slice(low, None, 2),)],
    "select": lambda x, d, low, high: x.select(d, low),
    "transpose": lambda x, d, low, high: x.transpose(0, d),
    "movedim": lambda x, d, low, high: x.movedim(d, 0),
    "unflatten": lambda x, d, low, high: x.unflatten(d, (-1, 1 + (x.shape[d] % 2 == 0))),
    "unsqueeze": lambda x, d, low, high: x.unsqueeze(d),
    "squeeze": lambda x, d, low, high: x.squeeze(),
    "detach": lambda x, d, low, high: x.detach(),
    "chunk": lambda x, d, low, high: x.chunk(high, d)[-1],
    "unbind": lambda x, d, low, high: x.unbind(d)[low],
    "to": lambda x, d, low, high: x.to(x.dtype),
    "real": lambda x, d, low, high: x.real,
    "unfold": lambda x, d, low, high: x.unfold(d, high, high),
    "clone": lambda x, d, low, high: x.clone(),
    "product": lambda x, d, low, high: x * 2,
}


def assign(x: Tensor, d: int, low: int, high: int) -> None:
    x[(slice(None),) * d + (slice(low, high),)] = 8.0


def add_to_rows(x: Tensor, d: int, low: int, high: int) -> None:
    x[(slice(None),) * d + (slice(low, high),)] += 2


def copy_a_row(x: Tensor, d: int, low: int, high: int) -> None:
    x[(slice(None),) * d + (low,)] = x[(slice(None),) * d + (-1,)]


def add_other_rows(x: Tensor, d: int, low: int, high: int) -> None:
    """As a flux from the last cells."""
    before = (slice(None),) * d
    x[(*before, slice(low, high))] += x[(*before, slice(low - high, None))].sin()


def every_second(x: Tensor, d: int, low: int, high: int) -> None:
    x[(slice(None),) * d + (slice(low, None, 2),)] *= 0.5


def scale_a_row(x: Tensor, d: int, low: int, high: int) -> None:
    x[(slice(None),) * d + (low,)] *= x.mean()


def mask(x: Tensor, d: int, low: int, high: int) -> None:
    x[x > 3] = 0.5


WRITES: dict[str, Callable[[Tensor, int, int, int], object]] = {
    "assign": assign,
    "add to rows": add_to_rows,
    "add other rows": add_other_rows,
    "every second": every_second,
    "scale a row": scale_a_row,
    "copy a row": copy_a_row,
    "mask": mask,
    "multiply": lambda x, d, low, high: x.mul_(3),
    "divide": lambda x, d, low, high: x.div_(x.detach().abs() + 1),
    "add by index": lambda x, d, low, high: x.index_add_(
        d, torch.tensor([low]), x.narrow(d, -1, 1).cos()
    ),
    "fill": lambda x, d, low, high: x.fill_(4),
    "clamp": lambda x, d, low, high: x.clamp_(max=10),
    "index_fill": lambda x, d, low, high: x.index_fill_(d, torch.tensor([low]), 9.0),
    "out": lambda x, d, low, high: torch.mul(x, 2, out=x),
    "put": lambda x, d, low, high: x.put_(torch.tensor([0]), torch.tensor([5.0]).to(x.dtype)),
}


@dataclass(frozen=True)
class Step:
    """What is done with tensor number `of`; a view becomes the next one."""

    of: int
    name: str
    place: tuple[int, int, int]

    def run(self, tensors: list[Tensor]) -> None:
        if self.name in VIEWS:
            tensors.append(VIEWS[self.name](tensors[self.of], *self.place))
        else:
            WRITES[self.name](tensors[self.of], *self.place)


def program(seed: int) -> tuple[Tensor, list[Step], list[Tensor]]:
    """A tensor, what is done with it, and all tensors at the end."""
    draw = random.Random(seed)
    shape = [draw.randint(1, 6) for _ in range(draw.randint(1, 3))]
    start = torch.arange(float(torch.Size(shape).numel())).double().view(shape) / 2
    tensors, steps = [start.clone()], list[Step]()
    for _ in range(draw.randint(3, 8)):
        of = draw.choice([draw.randrange(len(tensors)), len(tensors) - 1])
        if not tensors[of].ndim or not tensors[of].numel():
            continue
        d = draw.randrange(tensors[of].ndim)
        low = draw.randrange(tensors[of].shape[d])
        names = VIEWS if len(tensors) < 2 or draw.random() < 0.5 else WRITES
        place = d, low, draw.randint(low + 1, tensors[of].shape[d])
        steps.append(Step(of, draw.choice(list(names)), place))
        steps[-1].run(tensors)
    return start, steps, tensors


def check(seeds: Iterable[int], sizes: tuple[int, ...]) -> None:
    counts = collections.Counter[str]()
    for seed in seeds:
        start, steps, expected = program(seed)
        dims = [(seed + axis) % start.ndim for axis in range(len(sizes))]
        if len(set(dims)) < len(dims):
            continue
        about = f"seed {seed}: {tuple(start.shape)}, dims {dims}, {steps}"
        tensors = [lightning_shard.shard(start, mesh_of(*sizes), dims).clone()]
        refused = 0
        try:
            for step in steps:
                step.run(tensors)
            found = [lightning_shard.gather(x * 1) for x in tensors]
        except UnsupportedOperationError:
            refused, found = 1, []
        count = torch.tensor(refused)
        dist.all_reduce(count)
        assert count in (0, dist.get_world_size()), f"refused on some ranks only, {about}"
        for value, correct in zip(found, [] if refused else expected, strict=True):
            assert_same(value, correct, about)
        counts["refused" if refused else "exact"] += 1
    assert counts["exact"] > counts["refused"], counts


def gradient(steps: list[Step], leaf: Tensor, start: Tensor) -> Tensor:
    """Of all tensors at the end, each element with a weight of its own."""
    tensors = [start]
    for step in steps:
        step.run(tensors)
    terms = [
        (x * torch.arange(1.0, x.numel() + 1).double().cos().view(x.shape)).sum() for x in tensors
    ]
    return torch.autograd.grad(sum(terms, torch.zeros(())), leaf)[0]


def check_gradients(seeds: Iterable[int], sizes: tuple[int, ...]) -> None:
    """Of those programs that torch differentiates; what torch refuses is not compared."""
    compared = 0
    for seed in seeds:
        start, steps, _ = program(seed)
        dims = [(seed + axis) % start.ndim for axis in range(len(sizes))]
        if len(set(dims)) < len(dims):
            continue
        alone, leaf = start.clone().requires_grad_(), start.clone().requires_grad_()
        try:
            expected = gradient(steps, alone, alone.clone())
        except RuntimeError:
            continue
        try:
            split = lightning_shard.shard(leaf, mesh_of(*sizes), dims).clone()
            found = gradient(steps, leaf, split)
        except UnsupportedOperationError:
            continue
        dist.all_reduce(found)
        assert_same(found / dist.get_world_size(), expected, f"seed {seed}, dims {dims}, {steps}")
        compared += 1
    assert compared > 10, compared


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_gradients_on_three_ranks():
    check_gradients(range(20000, 20050), (3,))


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_gradients_on_two_by_two():
    check_gradients(range(30000, 30080), (2, 2))


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_more_gradients():
    check_gradients(range(20050, 20530), (3,))


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_three_ranks():
    check([*range(80), 1153, 2587, 2853], (3,))


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_two_by_two():
    check(range(60), (2, 2))


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_more_on_three_ranks():
    check(range(1000, 1670), (3,))
