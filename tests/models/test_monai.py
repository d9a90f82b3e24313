"""Networks and losses of MONAI."""

import pytest

from tests.models.check import check


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "name",
    [
        "unet",
        "attention_unet",
        "segresnet",
        "swin_unetr",
        "diffusion_unet",
        "dice_focal",
    ],
)
def test_model(name):
    check("monai", name, 2)
