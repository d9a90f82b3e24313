"""The promise: on any mesh, training equals the single-process run."""

import pytest
import torch

from tests.training import MODELS, STEPS, train_alone, train_sharded

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def check(name, domain, dtype, *, accumulate=1, clip=None):
    batch_size = 4
    losses, state = train_alone(name, dtype, batch_size, accumulate=accumulate, clip=clip)
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    sharded_losses, sharded_state = train_sharded(name, dtype, batch_size, domain, **options)
    assert len(losses) == len(sharded_losses) == STEPS
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


dtypes = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32], ids=["float64", "float32"]
)
models = pytest.mark.parametrize("name", MODELS)


@pytest.mark.spmd(1)
@dtypes
@models
def test_mesh_1x1(name, dtype):
    check(name, (1,), dtype)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [(1,), (2,)], ids=["2x1", "1x2"])
@dtypes
@models
def test_two_ranks(name, dtype, domain):
    check(name, domain, dtype)


@pytest.mark.spmd(3)
@dtypes
@models
def test_three_ranks_that_do_not_divide_the_extent(name, dtype):
    check(name, (3,), dtype)


@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(2,), (4,), (2, 2)], ids=["2x2", "1x4", "1x(2x2)"])
@dtypes
@models
def test_four_ranks(name, dtype, domain):
    check(name, domain, dtype)


@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(1,), (2,), (2, 2)], ids=["4x1", "2x2", "1x(2x2)"])
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"clip": 0.05}], ids=str)
@pytest.mark.parametrize("name", ["tfno", "dense_fno", "large_tfno"])
def test_accumulation_and_clipping(name, domain, options):
    check(name, domain, torch.float64, **options)
