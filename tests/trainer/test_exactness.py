"""The promise: on any mesh, training equals the single-process run."""

import pytest
import torch

from tests.pairs import choose
from tests.training import MODELS, steps_of, train_alone, train_sharded

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def check(name, domain, dtype, *, accumulate=1, clip=None):
    batch_size = 4
    losses, state = train_alone(name, dtype, batch_size, accumulate=accumulate, clip=clip)
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    sharded_losses, sharded_state = train_sharded(name, dtype, batch_size, domain, **options)
    assert len(losses) == len(sharded_losses) == steps_of(accumulate)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(sharded_losses, losses, rtol=tolerance, atol=0)
    assert state.keys() == sharded_state.keys()
    for key, value in state.items():
        scale = float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            sharded_state[key],
            value,
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda m, key=key: f"{key}: {m}",
        )


F64, F32 = torch.float64, torch.float32
models = pytest.mark.parametrize("name", MODELS)
SINGLE = pytest.param(F32, marks=pytest.mark.slow)  # on two ranks in the default run
dtypes = pytest.mark.parametrize("dtype", [F64, SINGLE], ids=str)


def on_meshes(*domains, marks=(), slow=()):
    """Every model on every mesh in double precision; in single precision on one, by turns.

    Args:
        domains: The meshes.
        marks: Those of all tests in single precision.
        slow: The meshes whose tests in double precision are slow.
    """
    double = [
        pytest.param(name, F64, domain, marks=[pytest.mark.slow] * (domain in slow))
        for name in MODELS
        for domain in domains
    ]
    single = [
        pytest.param(once.values[0], F32, once.values[1], marks=[*once.marks, *marks])
        for once in choose(MODELS, domains)
    ]
    return pytest.mark.parametrize(("name", "dtype", "domain"), [*double, *single], ids=str)


@pytest.mark.spmd(1)
@dtypes
@models
def test_mesh_1x1(name, dtype):
    check(name, (1,), dtype)


@pytest.mark.spmd(2)
@on_meshes((1,), (2,), slow=[(1,)])
def test_two_ranks(name, dtype, domain):
    check(name, domain, dtype)


@pytest.mark.slow
@pytest.mark.spmd(3)
@dtypes
@pytest.mark.parametrize("name", choose(MODELS, fast=["tfno", "mnist"]))
def test_three_ranks_that_do_not_divide_the_extent(name, dtype):
    check(name, (3,), dtype)


@pytest.mark.spmd(4)
@on_meshes((2, 2), (4,), (2,), marks=[pytest.mark.slow], slow=[(4,), (2,)])
def test_four_ranks(name, dtype, domain):
    check(name, domain, dtype)


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("name", "domain", "options"),
    choose(
        ["tfno", "dense_fno", "large_tfno"],
        [(1,), (2,), (2, 2)],
        [{"accumulate": 2}, {"clip": 0.05}],
    ),
    ids=str,
)
def test_accumulation_and_clipping(name, domain, options):
    check(name, domain, torch.float64, **options)
