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


@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", ["attention_unet", "boundary", "spectral_loss"])
def test_two_by_two_ranks(name):
    check("handwritten", name, 2, 2)
