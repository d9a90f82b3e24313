"""Blocks as people write them."""

import pytest

from tests.models.check import check


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "name",
    [
        "attention_unet",
        "odd_unet_pad",
        "conv_lstm",
        "fno_block",
        "afno",
        "window_attention",
        "linear_attention",
        "physics_loss",
        "pinn",
        "einops",
        "warp",
    ],
)
def test_model(name):
    check("handwritten", name, 2)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", ["odd_unet_crop", "rollout"])
def test_three_ranks(name):
    check("handwritten", name, 3)


@pytest.mark.slow_rows("attention_unet")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", ["attention_unet", "boundary", "spectral_loss"])
def test_two_by_two_ranks(name):
    check("handwritten", name, 2, 2)


ROWS = (
    "masked_segmentation", "focal_by_index", "advection_by_index", "radial_spectrum",
    "message_passing", "points_in_cells",
)  # fmt: skip


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "name", ["masked_losses", "masked_select_loss", "energy_spectrum_bincount"]
)
def test_rows_that_values_decide(name):
    check("handwritten", name, 2)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_values_decide_on_three_ranks(name):
    check("handwritten", name, 3)


@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", ROWS[:4])
def test_rows_that_values_decide_on_two_by_two_ranks(name):
    check("handwritten", name, 2, 2)
