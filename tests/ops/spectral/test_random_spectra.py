"""Random chains of transforms, shifts, slices and assignments equal those of one process."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lightning_shard
from lightning_shard import UnsupportedOperationError, spectral_method
from tests.parity import assert_same, mesh_of

SHAPE = (2, 3, 7, 5)
Step = Callable[[Tensor], Tensor]


def some_dims(choice: random.Random) -> list[int]:
    return choice.sample([0, 1, 2, 3], choice.randint(1, 4))


def forward(choice: random.Random) -> tuple[str, Step]:
    name, norm = choice.choice(["fftn", "rfftn"]), choice.choice([None, "ortho", "forward"])
    dims = some_dims(choice)
    sizes = [SHAPE[d] + choice.choice([0, 0, -1, 2]) for d in dims]
    sizes = [max(n, 2) for n in sizes] if choice.random() < 0.4 else None
    function = getattr(torch.fft, name)
    return f"{name} {dims} {sizes} {norm}", lambda x: function(x, s=sizes, dim=dims, norm=norm)


def shift(choice: random.Random) -> tuple[str, Step]:
    name = choice.choice(["fftshift", "ifftshift"])
    dims = choice.choice([None, some_dims(choice), choice.choice([-1, 0, 2])])
    if choice.random() < 0.1:
        dims = [2, 2]
    function = getattr(torch.fft, name)
    return f"{name} {dims}", lambda x: function(x, dim=dims)


def slices(choice: random.Random) -> tuple[str, Step]:
    index = tuple(
        slice(*choice.choice([(None,), (1, None), (0, -1), (None, None, 2), (-2, None)]))
        for _ in range(choice.randint(1, 4))
    )
    return f"{index}", lambda x: x[index]


def arithmetic(choice: random.Random) -> tuple[str, Step]:
    name = choice.choice(["conj", "flip", "roll", "times", "clone"])
    steps: dict[str, Step] = {
        "conj": lambda x: x.conj(),
        "flip": lambda x: x.flip(2, 0),
        "roll": lambda x: x.roll((1, -2), (3, 2)),
        "times": lambda x: x * 2,
        "clone": lambda x: x.clone(),
    }
    return name, steps[name]


def assigned(choice: random.Random, dims: list[int]) -> tuple[str, Step]:
    """Modes are written into zeros, which may be shifted."""
    starts = [choice.randint(0, 2) if d in dims else 0 for d in range(4)]
    shifts: list[list[int] | None] = [[], [], None, [2, 3], [0], [3]]
    moved = choice.choice(shifts)

    def step(x: Tensor) -> Tensor:
        shape = [n + 2 * (d in dims) for d, n in enumerate(x.shape)]
        out = torch.zeros(shape, dtype=x.dtype)
        out[tuple(slice(a, a + n) for a, n in zip(starts, x.shape, strict=True))] = x
        return torch.fft.ifftshift(out, dim=moved) if moved != [] else out

    return f"assigned at {starts}, shifted {moved}", step


def inverse(choice: random.Random, dims: list[int]) -> tuple[str, Step]:
    name = choice.choice(["ifftn", "irfftn"])
    function = getattr(torch.fft, name)
    return f"{name} {dims}", lambda x: function(x, dim=dims)


def program(seed: int) -> list[tuple[str, Step]]:
    choice = random.Random(seed)
    steps = [forward(choice)]
    kinds = [choice.choice([shift, shift, slices, arithmetic]) for _ in range(choice.randint(1, 3))]
    steps += [kind(choice) for kind in kinds]
    dims, ending = some_dims(choice), choice.random()
    if ending < 0.4:
        steps.append(assigned(choice, dims))
    if ending < 0.7:
        steps.append(inverse(choice, dims))
    return steps


def run(steps: list[tuple[str, Step]], x: Tensor) -> Tensor:
    for _, step in steps:
        x = step(x)
    return x


def check(mesh, dims, seeds):
    exact = 0
    for seed in seeds:
        steps = program(seed)
        torch.manual_seed(seed)
        field = torch.randn(SHAPE, dtype=torch.float64)
        alone, mine = field.clone().requires_grad_(), field.clone().requires_grad_()
        try:
            wanted = run(steps, alone)
        except RuntimeError:  # an irfftn of one mode has no points
            continue
        words = f"seed {seed}: {'; '.join(words for words, _ in steps)}"
        with spectral_method(["auto", "dft", "fft"][seed % 3]):
            try:
                found = lightning_shard.gather(run(steps, lightning_shard.shard(mine, mesh, dims)))
            except UnsupportedOperationError:
                continue
            assert found.shape == wanted.shape, words
            assert_same(found.detach(), wanted.detach(), words)
            (expected,) = torch.autograd.grad(wanted.abs().square().sum(), alone)
            (own,) = torch.autograd.grad(found.abs().square().sum(), mine)
        torch.distributed.all_reduce(own)
        assert_same(own / torch.distributed.get_world_size(), expected, words)
        exact += 1
    assert exact > 0.8 * len(seeds)


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_three_ranks():
    check(mesh_of(3), 2, range(40))


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_two_by_two():
    check(mesh_of(2, 2), [2, 3], range(1000, 1030))
