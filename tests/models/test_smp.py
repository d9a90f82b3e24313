"""Networks of segmentation_models_pytorch."""

import pytest

from tests.models.check import check


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("unet", marks=pytest.mark.slow),
        pytest.param("fpn", marks=pytest.mark.slow),
        pytest.param("manet", marks=pytest.mark.slow),
        pytest.param("segformer", marks=pytest.mark.slow),
        "focal_ignore",
    ],
)
def test_model(name):
    check("smp", name, 2)
