"""Networks of segmentation_models_pytorch."""

import pytest

from tests.models.check import check


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "name",
    [
        "unet",
        "fpn",
        "manet",
        "segformer",
    ],
)
def test_model(name):
    check("smp", name, 2)
