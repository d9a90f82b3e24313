"""Random programs on split tensors: values and gradients are those of one process, or refused.

What is refused, is refused on all ranks alike.
"""

import collections
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lightning_shard
from lightning_shard import DomainTensor, UnsupportedOperationError
from lightning_shard.tiles.tile_tensor import Tiles, TileTensor
from tests.parity import mesh_of, tiles_of
from tests.random_programs import FUNCTIONS, LAYERS, MORE, STEPS, Draw, Program, Step, program

Functions = dict[str, Callable[[Draw], Step]]
WIDE = {name: step for name, step in (FUNCTIONS | MORE).items() if name != "detach"}
# torch's second derivatives of these are NaN at zeros, or there are none
AT_ZERO = {"p-norm", "renorm", "logcumsumexp", "normalize", "similarity", "std", "distances"}
SMOOTH = {
    name: step
    for name, step in (WIDE | LAYERS).items()
    if name not in AT_ZERO | {"attention", "best index", "searchsorted"}
}


def run(
    made: Program, start: Tensor, between: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Tensor, Tensor]:
    """The result and the gradient of the start; `between` is done to what each step gives."""
    value = start
    for step in made.steps:
        value = between(step(value))
    weights = torch.arange(value.numel(), dtype=torch.float64).cos().view(value.shape)
    (gradient,) = torch.autograd.grad((value * weights).sum(), start, materialize_grads=True)
    return value, gradient


def rounding_decides(made: Program, expected: tuple[Tensor, Tensor]) -> bool:
    """Whether one process gives something else where each value moves by a rounding: a tie, 0/0."""
    draw = torch.Generator().manual_seed(0)

    def moved(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=draw, dtype=torch.float64)
        return x + 1e-15 * noise * (1 + x.detach().abs())

    found = run(made, made.start.clone().requires_grad_(), moved)
    return not all(
        torch.allclose(x, y, rtol=1e-8, atol=1e-10, equal_nan=True)
        for x, y in zip(found, expected, strict=True)
    )


def run_twice(made: Program, start: Tensor) -> list[Tensor]:
    """The gradients by the start and by a plain weight, and those of their squared norm."""
    weight = torch.linspace(0.1, 1, start.shape[-1], dtype=torch.float64, requires_grad=True)
    value = start * weight.cos()
    for step in made.steps:
        value = step(value)
    weights = torch.arange(value.numel(), dtype=torch.float64).cos().view(value.shape)
    found = torch.autograd.grad(
        (value * weights).sin().sum(), [start, weight], create_graph=True, materialize_grads=True
    )
    penalty = found[0].square().sum() + found[1].square().sum()
    return [*found, *torch.autograd.grad(penalty, [start, weight], materialize_grads=True)]


def whole(x: Tensor) -> Tensor:
    return (lightning_shard.gather(x) if isinstance(x, DomainTensor | TileTensor) else x).detach()


def refused_alike(made: Program, start: Tensor) -> bool:
    """Whether a step is refused; each rank tells the others after each step."""
    value, refused = start, False
    for name, step in zip(made.names, made.steps, strict=True):
        try:
            value = step(value)
        except UnsupportedOperationError:
            refused = True
        count = torch.tensor(int(refused))
        dist.all_reduce(count)
        assert count in (0, dist.get_world_size()), f"{name} is refused on some ranks only"
        if refused:
            return True
    return False


def check(seeds: Sequence[int], sizes: tuple[int, ...], functions: Functions = STEPS) -> None:
    counts = collections.Counter[str]()
    for seed in seeds:
        made = program(seed, functions)
        ndim = made.start.ndim
        dims = [(made.split + axis) % ndim for axis in range(len(sizes))]
        if not made.steps or len(set(dims)) < len(dims):
            continue
        start = made.start.clone().requires_grad_()
        expected = run(made, start)
        about = f"seed {seed}: {tuple(start.shape)}, dims {dims}, {made.names}"
        split = lightning_shard.shard(made.start, mesh_of(*sizes), dims).requires_grad_()
        if refused_alike(made, split.detach()):
            counts["refused"] += 1
            continue
        try:
            for value, correct in zip(run(made, split), expected, strict=True):
                torch.testing.assert_close(
                    whole(value), correct.detach(), rtol=1e-8, atol=1e-10, equal_nan=True, msg=about
                )
            counts["exact"] += 1
        except AssertionError:
            if not rounding_decides(made, expected):
                raise
            counts["decided by rounding"] += 1
    assert counts["refused"] < 0.15 * counts["exact"], counts
    assert counts["decided by rounding"] <= 1 + 0.01 * counts["exact"], counts
    assert counts["exact"] > 0.5 * len(seeds), counts


def check_twice(
    seeds: Iterable[int],
    sizes: tuple[int, ...],
    functions: Functions = STEPS,
    places: Callable[..., DeviceMesh | Tiles] = mesh_of,
) -> None:
    """Also where a rank has no rows: its graph must call what those of the others call."""
    for seed in seeds:
        made = program(seed, functions)
        dims = [(made.split + axis) % made.start.ndim for axis in range(len(sizes))]
        if not made.steps or len(set(dims)) < len(dims):
            continue
        expected = run_twice(made, made.start.clone().requires_grad_())
        split = lightning_shard.shard(made.start, places(*sizes), dims).requires_grad_()
        try:
            found = run_twice(made, split)
        except UnsupportedOperationError:
            continue
        for value, correct in zip(found, expected, strict=True):
            torch.testing.assert_close(
                whole(value), correct.detach(), rtol=1e-8, atol=1e-10, equal_nan=True,
                msg=f"seed {seed}: {tuple(made.start.shape)}, dims {dims}, {made.names}",
            )  # fmt: skip


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_two_ranks():
    check(range(60), (2,))


@pytest.mark.spmd(3)
def test_three_ranks():
    check([*range(1000, 1030), 200820, 201351], (3,))  # the last write through views of turned rows


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_other_programs_on_three_ranks():
    check(range(1030, 1060), (3,))


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_second_derivatives_on_three_ranks():
    check_twice([*range(40), 487, 846, 2077], (3,))


@pytest.mark.spmd(4)
def test_second_derivatives_on_two_by_two():
    check_twice([5489, 5881, 5907, 6400, 6439], (2, 2))


@pytest.mark.slow
@pytest.mark.spmd(3)
@pytest.mark.parametrize("part", range(4))
def test_more_on_three_ranks(part):
    check(range(2000 + 500 * part, 2500 + 500 * part), (3,))


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_more_on_four_ranks(sizes):
    check(range(5000, 5600), sizes)


@pytest.mark.spmd(3)
def test_wider_programs_on_three_ranks():
    check([*range(16), 125], (3,), WIDE)  # the last gives no pairs of numbers an expanded gradient


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(100, 1300, 200))
@pytest.mark.spmd(3)
def test_more_wider_programs_on_three_ranks(begin):
    check(range(begin, begin + 200), (3,), WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(2000, 2600, 200))
@pytest.mark.spmd(4)
def test_wider_programs_on_two_by_two(begin):
    check(range(begin, begin + 200), (2, 2), WIDE)


def test_second_derivatives_of_layers_in_tiles():
    check_twice(range(12), (3,), SMOOTH, tiles_of)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (5,), (2, 2)], ids=str)
def test_more_second_derivatives_of_layers_in_tiles(sizes):
    check_twice(range(100, 300), sizes, SMOOTH, tiles_of)


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_second_derivatives_of_layers_on_three_ranks():
    check_twice(range(300, 400), (3,), SMOOTH)
