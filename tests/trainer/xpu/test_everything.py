"""FSDP2's options and the Trainer's features again, on fake Intel GPUs (tests/fake_xpu)."""

import pytest

from tests.checkpoint import test_callbacks as test_checkpoints_callbacks
from tests.fsdp import test_precision as test_fsdp_precision
from tests.fsdp.network import assert_equal_runs, train_alone, train_sharded
from tests.fsdp.test_features import ROWS
from tests.trainer import test_features as test_trainer_features
from tests.trainer.test_features import FEATURES

# offload has a group of its own (test_xpu_features.py)
rows = pytest.mark.parametrize("row", [name for name in ROWS if name != "offload"])
# on accelerators torch averages weights with factors of 32 bits
features = pytest.mark.parametrize("name", [name for name in FEATURES if name != "average"])


@pytest.mark.slow
@pytest.mark.spmd(4, "xpu")
@rows
def test_sharding_on_four_devices(row):
    assert_equal_runs(train_sharded((1,), ROWS[row]), train_alone())


@pytest.mark.slow
@pytest.mark.spmd(4, "xpu")
@rows
def test_sharding_with_a_domain_accumulation_and_clipping(row):
    found = train_sharded((2,), ROWS[row], accumulate_grad_batches=2, gradient_clip_val=0.05)
    assert_equal_runs(found, train_alone(accumulate=2, clip=0.05))


@pytest.mark.slow
@pytest.mark.spmd(4, "xpu")
@pytest.mark.parametrize("row", ["full", "none", "hybrid"])
def test_sharding_on_a_domain_of_two_dims(row):
    assert_equal_runs(train_sharded((2, 2), ROWS[row]), train_alone())


@pytest.mark.slow
@pytest.mark.spmd(4, "xpu")
@pytest.mark.parametrize("domain", [(1,), (4,)], ids=["4x1", "1x4"])
def test_an_overflow_on_one_device_skips_the_step_on_all(domain):
    test_fsdp_precision.test_an_overflow_on_one_rank_skips_the_step_on_all(domain)


@pytest.mark.slow
@pytest.mark.spmd(2, "xpu")
@features
def test_features_of_the_trainer(name):
    test_trainer_features.check(name, (2,))


@pytest.mark.slow
@pytest.mark.spmd(2, "xpu")
def test_modules_of_the_meta_device():
    """Their metrics, too, are on the device after a checkpoint was loaded."""
    test_checkpoints_callbacks.test_modules_of_the_meta_device({})
